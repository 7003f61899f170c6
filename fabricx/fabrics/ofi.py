"""The ofi fabric, control path: finds a libfabric, opens domains, shakes hands. The hot path is pyx/ofi.pyx.

The provider is efa where there is hardware, else tcp (called net in libfabric 1.17). Libraries are looked for in the order
of `places()`; the first that opens and is new enough wins.
"""

from __future__ import annotations

import glob
import itertools
import logging
import os
import re
import secrets
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import errors
from ..address import parse_hostport
from ..config import Config
from .base import CAP_DEVICE, CAP_LANDED, Domain, DomainInfo, GroupSpec, LocalKey, Memory
from .control import ControlDomain, ControlFabric
from .links import route_host, sockaddr_host

try:
    from .. import _ofi
except ImportError as _e:  # pragma: no cover - depends on the build
    raise ImportError(f"fabricx was built without libfabric's headers (Debian: libfabric-dev): {_e}") from None

log = logging.getLogger("fabricx")

SYMBOLS = ("fi_getinfo", "fi_freeinfo", "fi_dupinfo", "fi_fabric", "fi_version", "fi_strerror", "fi_tostr")
OLDEST = (1, 17)
DMABUF = (1, 20)  # registration by dma-buf came with this
NATIVE_TCP = (1, 18)  # from here on provider "tcp" has native RDM endpoints; in 1.17 the same code is called "net"
_DEPTH = 4096  # more than one peer can have outstanding, so that a stopped one leaves room for others


def _efa_environment() -> dict[str, str]:
    """What the efa provider reads from the environment when it starts, where the user has not said otherwise.

    Not here: FI_EFA_USE_DEVICE_RDMA. The endpoint option says the same, and where a NIC cannot do it the variable aborts
    the process.
    """
    # one way for all peers: shm would not be RDMA, and hangs after a kill -9
    out = {"FI_EFA_ENABLE_SHM_TRANSFER": "0"}
    # From Linux 5.13 on a fork leaves registered pages alone. Before, a process without this is aborted by its first
    # subprocess; with it registrations cost more.
    kernel = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if kernel and (int(kernel[1]), int(kernel[2])) < (5, 13):
        out["FI_EFA_FORK_SAFE"] = "1"
    return out


@dataclass(frozen=True, slots=True)
class Library:
    """An opened libfabric."""

    path: str
    version: tuple[int, int]
    api: Any
    handle: Any


def places(config: Config) -> list[str]:
    """Where libfabric is looked for, in order: AWS's own, a system one, the one in the mpich wheel. A setting is the only
    place when it is given."""
    if config.ofi_library:
        return [config.ofi_library]
    found = [*glob.glob("/opt/amazon/efa/lib*/libfabric.so.1"), "libfabric.so.1"]
    for prefix in dict.fromkeys((sys.prefix, sys.base_prefix, *sys.path)):
        found += glob.glob(os.path.join(prefix, "lib", "mpich", "libfabric.so.1"))
        found += glob.glob(os.path.join(prefix, "..", "..", "mpich", "libfabric.so.1"))
    return list(dict.fromkeys(found))


def _open(path: str) -> Library:
    try:
        import cffi
    except ImportError:
        raise errors.FabricUnavailable("the ofi fabric needs cffi: pip install fabricx[ofi]") from None
    # Debian's library pulls in libinfinipath, which would take over SIGINT, SIGTERM and SIGSEGV
    os.environ.setdefault("IPATH_NO_BACKTRACE", "1")
    for k, v in _efa_environment().items():
        os.environ.setdefault(k, v)
    ffi = cffi.FFI()
    ffi.cdef("".join(f"void {s}(void);" for s in SYMBOLS))
    lib = ffi.dlopen(path)
    addresses = [int(ffi.cast("uintptr_t", ffi.addressof(lib, s))) for s in SYMBOLS]
    api = _ofi.Api(addresses)
    return Library(path, api.version, api, lib)


_opened: dict[str, Library] = {}
_opening = threading.Lock()


def library(config: Config) -> Library:
    """The libfabric to use. A system library below 1.18 gives way to a newer one.

    Raises
    ------
    FabricUnavailable
        listing every place looked at.
    """
    with _opening:
        tried: list[str] = []
        old: Library | None = None
        for path in places(config):
            lib = _opened.get(path)
            if lib is None:
                try:
                    lib = _opened[path] = _open(path)
                except (OSError, AttributeError) as e:
                    tried.append(f"{path} ({e})")
                    continue
            if lib.version < OLDEST:
                tried.append(
                    f"{path} (version {lib.version[0]}.{lib.version[1]}; {OLDEST[0]}.{OLDEST[1]} or newer is needed)"
                )
            elif lib.version < NATIVE_TCP and not config.ofi_library:
                old = old or lib
            else:
                return lib
        if old is not None:
            return old
        raise errors.FabricUnavailable(
            "no libfabric; install it (Debian: libfabric1, or pip install mpich) or name it by FABRICX_LIBFABRIC; "
            "looked at: " + ("; ".join(tried) or "nothing")
        )


def choose_provider(lib: Library, config: Config) -> tuple[str, str]:
    """(provider, why)."""
    if config.ofi_provider:
        return config.ofi_provider, "asked for"
    found = lib.api.list("efa", "")
    if isinstance(found, list) and any(p == "efa" for p, _ in found):
        return "efa", "there is EFA hardware"
    if lib.version >= NATIVE_TCP:
        return "tcp", "no EFA hardware"
    return "net", f"no EFA hardware; libfabric {lib.version[0]}.{lib.version[1]} calls native tcp so"


class OfiDomain(ControlDomain):
    """One libfabric domain with its endpoint."""

    def __init__(
        self, fabric: OfiFabric, spec: GroupSpec, lib: Library, provider: str, node: str, domain: str, index: int
    ) -> None:
        super().__init__(fabric, spec)
        self.lib, self.index = lib, index
        skip = index if not domain else 0
        try:
            try:
                self.state = _ofi.OfiState(
                    lib.api,
                    provider,
                    node,
                    domain,
                    skip,
                    spec.incarnation,
                    fabric.hello_fd,
                    spec.device.startswith("cuda"),
                )
            except OSError:
                if not spec.device.startswith("cuda"):
                    raise
                log.info("provider %s cannot reach device memory", provider)
                self.state = _ofi.OfiState(lib.api, provider, node, domain, skip, spec.incarnation, fabric.hello_fd)
        except OSError as e:
            where = f" at {node}" if node else ""
            raise errors.FabricUnavailable(f"provider {provider}{where} of {lib.path}: {e.strerror or e}") from e
        self.state.start()
        i = self.state.info()
        self.ops, self.dom, self.addr = self.state.ops, self.state.dom, self.state.addr
        self.wait_fd = i["fd"]
        caps = (CAP_LANDED if i["landed"] else 0) | (CAP_DEVICE if i["hmem"] else 0)
        self.provider, self.prov_key, self.key_size = i["provider"], i["prov_key"], i["key_size"]
        self.info = DomainInfo(
            f"{i['domain'] or provider}#{index}",
            f"libfabric {lib.version[0]}.{lib.version[1]} {i['provider']} ({lib.path})",
            caps,
            i["max_msg"],
            depth=_DEPTH,
            inline=i["inject"],
        )
        self.keys = itertools.count(16)

    def link_host(self) -> str:
        return sockaddr_host(self.addr) or route_host()

    def strerror(self, rc: int) -> str:
        return str(self.lib.api.strerror(rc))

    # -- registration

    def reg(self, memory: Memory) -> LocalKey:
        device = -1
        if memory.device != "cpu":
            if not self.info.caps & CAP_DEVICE:
                raise errors.RegistrationError(
                    95,
                    f"{memory.length} bytes at {memory.addr:#x} on {memory.device}: "
                    f"provider {self.provider} reaches host memory only",
                )
            device = int(memory.device.partition(":")[2] or 0)
        slot, rkey = self.take_slot()
        key = next(self.keys) if self.key_size < 8 else secrets.randbits(62) | 1 << 62
        try:
            with self.spec.lock():
                dmabuf = memory.dmabuf_fd if self.lib.version >= DMABUF else -1
                mr, desc = self.state.add_region(
                    slot,
                    rkey,
                    memory.addr,
                    memory.length,
                    key,
                    1 if device >= 0 else 0,
                    max(0, device),
                    dmabuf,
                    memory.dmabuf_offset,
                )
                if memory.readonly:
                    self.state.hide_region(slot)
        except OSError as e:
            self.give_slot(slot)
            raise errors.RegistrationError(e.errno, f"{self.info.name}: {e.strerror}") from None
        self.regions[rkey] = (mr, memory)
        return LocalKey(desc, rkey, memory)

    def drop_region(self, rkey: int, mr: int) -> int:
        return int(self.state.drop_region(rkey, mr))

    def recover(self, peer: int, ctxs: np.ndarray, deadline: float) -> np.ndarray:
        """What a failed endpoint has delivered cannot be told: libfabric says nothing of it."""
        return np.full(len(ctxs), -1, np.int64)

    def free_mr(self, mr: int) -> None:
        _ofi.close_mr(mr)

    def poll(self) -> None:
        _ofi.poll_once(self.dom)


class OfiFabric(ControlFabric):
    """libfabric: efa on AWS, tcp anywhere."""

    name = "ofi"

    @classmethod
    def available(cls) -> tuple[bool, str]:
        try:
            config = Config.from_env()
            lib = library(config)
            provider, why = choose_provider(lib, config)
        except errors.FabricxError as e:
            return False, str(e)
        return True, f"libfabric {lib.version[0]}.{lib.version[1]} ({lib.path}), provider {provider}: {why}"

    @classmethod
    def hardware(cls, config: Config) -> tuple[bool, str]:
        """Whether there is a NIC that is more than a socket."""
        if not glob.glob("/sys/class/infiniband/*") and not config.ofi_provider.startswith("efa"):
            return False, "no RDMA device in /sys/class/infiniband"
        try:
            lib = library(config)
            provider, why = choose_provider(lib, config)
        except errors.FabricUnavailable as e:
            return False, str(e)
        return provider.startswith("efa"), f"provider {provider}: {why}"

    def open(self, spec: GroupSpec) -> list[Domain]:
        lib = library(spec.config)
        provider, why = choose_provider(lib, spec.config)
        log.info("libfabric %d.%d at %s, provider %s: %s", *lib.version, lib.path, provider, why)
        node = ""
        if spec.config.ofi_address:
            node = parse_hostport(spec.config.ofi_address)[0]
        elif provider in ("tcp", "net"):
            node = "127.0.0.1"
        names = [""] * spec.nics if isinstance(spec.nics, int) else list(spec.nics)
        domains: list[OfiDomain] = []
        try:
            for i, name in enumerate(names):
                domains.append(OfiDomain(self, spec, lib, provider, node, name, i))
        except BaseException:
            for d in domains:
                d.state.shut()
            raise
        self.add(domains)
        return list(domains)
