"""The ofi fabric's own: libraries and their search, kill -9, addresses that lead nowhere, strangers' messages, network namespaces,
and the paths that need EFA hardware, over a stand-in library."""

from __future__ import annotations

import base64
import ctypes
import gc
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import ofi_reason, until
from peer import Peer

import fabricx as fx

ROOT = Path(__file__).resolve().parents[2]
DEBIAN = (glob.glob("/usr/lib/*/libfabric.so.1") + [""])[0]

pytestmark = pytest.mark.skipif(bool(ofi_reason()), reason=ofi_reason() or "-")
FAST = fx.Config.from_env(timeout=8.0, connect_timeout=5.0)


def b64(x: fx.NetAddr | fx.MrDesc) -> str:
    return base64.b64encode(x.to_bytes()).decode()


def desc(p: Peer) -> fx.MrDesc:
    return fx.MrDesc.from_bytes(base64.b64decode(p.desc))


@pytest.fixture
def engine() -> Iterator[fx.TransferEngine]:
    with fx.TransferEngine("ofi", config=FAST) as e:
        yield e


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    all_: list[Peer] = []
    yield all_
    for p in all_:
        p.kill()


# ---------------------------------------------------------------- the library


@pytest.mark.skipif(not DEBIAN, reason="Debian's libfabric (libfabric1) is not installed")
def test_debians_library_passes_the_same_tests() -> None:
    """1.17, where native tcp is called net: in a process of its own, since two libraries would share symbols."""
    env = {**os.environ, "FABRICX_LIBFABRIC": DEBIAN, "FABRICX_TEST_FABRICS": "ofi"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/fabrics/test_conformance.py",
               "tests/engine/test_transfers.py", "tests/engine/test_imm.py", "-k", "ofi-caller or ofi-2nics"]  # fmt: skip
    p = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert p.returncode == 0, p.stdout[-3000:]
    assert " passed" in p.stdout and "skipped" not in p.stdout.splitlines()[-1]
    # that they did use it: what an engine of theirs opens
    say = "import fabricx as fx, engines\nwith fx.TransferEngine('ofi', config=engines.QUICK) as e: print(e.groups[0].domains[0].info)"
    where = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "engine")))
    q = subprocess.run(
        [sys.executable, "-c", say], env={**env, "PYTHONPATH": where}, capture_output=True, text=True, timeout=60
    )
    assert f"libfabric 1.17 net ({DEBIAN})" in q.stdout, q.stdout + q.stderr


def test_the_search_has_an_order_and_a_setting_is_the_only_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fabricx.fabrics import ofi

    assert ofi.places(fx.Config(ofi_library="/x/y.so")) == ["/x/y.so"]
    wheel = tmp_path / "lib" / "mpich" / "libfabric.so.1"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    aws = "/opt/amazon/efa/lib64/libfabric.so.1"
    real = glob.glob
    monkeypatch.setattr(ofi.glob, "glob", lambda p: [aws] if p.startswith("/opt/amazon") else real(p))
    monkeypatch.setattr(ofi.sys, "prefix", str(tmp_path))
    found = ofi.places(fx.Config())
    assert found.index(aws) < found.index("libfabric.so.1") < found.index(str(wheel))


def test_an_old_system_library_gives_way_to_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from fabricx.fabrics import ofi

    def made(path: str, version: tuple[int, int]) -> ofi.Library:
        return ofi.Library(path, version, None, None)

    libs = {"a": made("a", (1, 17)), "b": made("b", (2, 5)), "c": made("c", (1, 10))}
    monkeypatch.setattr(ofi, "_opened", dict(libs))
    monkeypatch.setattr(ofi, "places", lambda c: [c.ofi_library] if c.ofi_library else ["c", "a", "b"])
    assert ofi.library(fx.Config()).path == "b"
    assert ofi.library(fx.Config(ofi_library="a")).path == "a"
    monkeypatch.setattr(ofi, "places", lambda c: ["c", "a"])
    assert ofi.library(fx.Config()).path == "a"
    monkeypatch.setattr(ofi, "places", lambda c: ["c", "/nowhere.so"])
    with pytest.raises(fx.FabricUnavailable, match=r"c \(version 1.10; 1.17 or newer.*/nowhere.so"):
        ofi.library(fx.Config())


def test_a_provider_that_is_not_there_is_named() -> None:
    with pytest.raises(fx.FabricUnavailable, match="carrier"):
        fx.TransferEngine("ofi", config=fx.Config(ofi_provider="carrier"))


def test_ctrl_c_still_reaches_python_with_debians_library() -> None:
    """Its libinfinipath would take over SIGINT."""
    if not DEBIAN:
        pytest.skip("Debian's libfabric (libfabric1) is not installed")
    code = "import fabricx as fx, os, signal, time\ne = fx.TransferEngine('ofi')\ntry:\n    os.kill(os.getpid(), signal.SIGINT); time.sleep(5)\nexcept KeyboardInterrupt:\n    print('interrupted')\ne.close()"
    env = {**os.environ, "FABRICX_LIBFABRIC": DEBIAN, "PYTHONPATH": str(ROOT)}
    p = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert p.returncode == 0 and p.stdout.strip() == "interrupted", p.stderr


# ---------------------------------------------------------------- peers that die or are not there


def test_a_killed_peer_fails_its_own_transfers_only(engine: fx.TransferEngine, peers: list[Peer]) -> None:
    dying, living = Peer("ofi", size=1 << 22), Peer("ofi", size=1 << 22)
    peers += [dying, living]
    h, _ = engine.reg_mr(engine.alloc(1 << 22))
    lost: list[fx.NetAddr] = []
    engine.on_peer_lost = lost.append
    d1, d2 = desc(dying), desc(living)
    engine.submit_single_write(8, None, (h, 0), (d1, 0)).wait()
    inflight = [engine.submit_single_write(1 << 20, 5, (h, 0), (d1, 0)) for _ in range(50)]
    os.kill(dying.pid, signal.SIGKILL)
    ends = set()
    for t in inflight:
        until(t.done, 8)
        ends.add(t.status)
    assert ends <= {"done", "failed"}
    assert all(isinstance(t.exception(), (fx.PeerLostError, type(None))) for t in inflight)
    with pytest.raises(fx.PeerLostError, match=str(dying.pid)):
        for _ in range(200):
            engine.submit_single_write(8, 5, (h, 0), (d1, 0)).wait()
            time.sleep(0.005)
    until(lambda: lost == [d1.owner])
    living.call(do="expect", imm=5, count=20)
    for _ in range(20):
        engine.submit_single_write(1 << 20, 5, (h, 0), (d2, 0)).wait()
    living.call(do="wait", id="expect")
    assert all(t.quiesced().wait(5) is None for t in inflight)


def test_a_killed_writer_is_lost_and_counts_whole_writes_only(engine: fx.TransferEngine, peers: list[Peer]) -> None:
    w = Peer("ofi", size=1 << 22)
    peers.append(w)
    buf = engine.alloc(1 << 22)
    _, mine = engine.reg_mr(buf)
    w.call(do="fill", n=1 << 22, value=9)
    w.call(do="write", n=8, imm=1, desc=b64(mine))
    engine.expect_imm_count(1, 1).wait()
    w.send(do="writes", count=100000, n=1 << 20, imm=2, desc=b64(mine))
    until(lambda: engine.imm_count(2) > 3)
    w.kill()
    time.sleep(0.3)
    n = engine.imm_count(2)
    time.sleep(0.1)
    assert engine.imm_count(2) == n and (buf.array[: 1 << 20] == 9).all()


def test_an_address_that_leads_nowhere_ends_at_its_deadline(engine: fx.TransferEngine, peers: list[Peer]) -> None:
    p = Peer("ofi")
    peers.append(p)
    d = desc(p)
    p.kill()
    h, _ = engine.reg_mr(bytearray(64))
    start = time.monotonic()
    with pytest.raises((fx.TransferTimeout, fx.PeerLostError), match=str(d.owner.pid)):
        engine.connect(d.owner, timeout=0.5)
    assert time.monotonic() - start < 5
    with pytest.raises((fx.TransferTimeout, fx.PeerLostError)):
        engine.add_peer_group([d.owner], timeout=0.5)


def test_a_restarted_peer_is_another_incarnation(engine: fx.TransferEngine, peers: list[Peer]) -> None:
    import dataclasses

    p = Peer("ofi")
    peers.append(p)
    d = desc(p)
    over = dataclasses.replace(d.owner, incarnation=d.owner.incarnation ^ 1)
    with pytest.raises((fx.PeerLostError, fx.TransferTimeout)):
        engine.connect(over, timeout=1.0)
    engine.connect(d.owner)


def test_sixteen_threads_connect_once(engine: fx.TransferEngine, peers: list[Peer]) -> None:
    p = Peer("ofi")
    peers.append(p)
    addr = desc(p).owner
    errors: list[BaseException] = []

    def go() -> None:
        try:
            engine.connect(addr)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=go) for _ in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(10)
    assert not errors and len(engine.groups[0].domains[0].peers()) == 1


def test_ipv6_loopback() -> None:
    c = fx.Config.from_env(timeout=5, connect_timeout=5, ofi_address="[::1]")
    try:
        a = fx.TransferEngine("ofi", config=c)
    except fx.FabricUnavailable as e:
        pytest.skip(f"no IPv6 loopback here: {e}")
    with a, fx.TransferEngine("ofi", config=c) as b:
        m = b.alloc(64)
        _, d = b.reg_mr(m)
        h, _ = a.reg_mr(bytearray(b"v6" * 32))
        x = b.expect_imm_count(1, 1)
        a.submit_single_write(64, 1, (h, 0), (fx.MrDesc.from_bytes(d.to_bytes()), 0)).wait()
        x.wait()
        assert bytes(m.array) == b"v6" * 32


def test_registering_again_and_again_stays_flat(engine: fx.TransferEngine) -> None:
    import psutil

    me = psutil.Process()
    memory = engine.alloc(4096)
    for k in range(2000):
        h, _ = engine.reg_mr(memory)
        engine.dereg_mr(h)
        if k == 500:
            gc.collect()  # of tests before this one
            fds, rss = me.num_fds(), me.memory_info().rss
    gc.collect()
    assert me.num_fds() <= fds
    assert me.memory_info().rss - rss < 4 << 20


# ---------------------------------------------------------------- two hosts


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.skipif(shutil.which("ip") is None, reason="iproute2 is not installed")
def test_between_two_hosts_in_network_namespaces() -> None:
    names = [f"fx{os.getpid()}{c}" for c in "ab"]
    made = subprocess.run(["ip", "netns", "add", names[0]], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    peers: list[Peer] = []

    def sh(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)

    try:
        sh("ip", "netns", "add", names[1])
        sh("ip", "link", "add", "fxv0", "netns", names[0], "type", "veth", "peer", "name", "fxv1", "netns", names[1])
        for i, n in enumerate(names):
            sh("ip", "-n", n, "addr", "add", f"192.168.77.{i + 1}/24", "dev", f"fxv{i}")
            sh("ip", "-n", n, "link", "set", f"fxv{i}", "up")
            sh("ip", "-n", n, "link", "set", "lo", "up")
        real = sys.executable
        for i, n in enumerate(names):
            wrapper = ["ip", "netns", "exec", n, real]
            peers.append(Peer("ofi", launcher=wrapper, config={"ofi_address": f"192.168.77.{i + 1}"}))
        a, b = peers
        a.call(do="fill", n=1 << 20, value=5)
        b.call(do="expect", imm=3, count=4)
        for k in range(4):
            a.call(do="write", n=200_000, at=0, to=k * 200_000, imm=3, desc=b.desc)
        b.call(do="wait", id="expect")
        assert b.call(do="sum", at=0, n=800_000) == 5 * 800_000
        b.call(do="recvs", n=100, count=2)
        a.call(do="send", text="hello from the other host", address=b.address)
        until(lambda: b.call(do="messages") == ["hello from the other host"])
        assert a.leave() == 0 and b.leave() == 0
    finally:
        for p in peers:
            p.kill()
        for n in names:
            subprocess.run(["ip", "netns", "del", n], capture_output=True)


# ---------------------------------------------------------------- a stand-in for EFA


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler for the stand-in library")
    out = tmp_path_factory.mktemp("stub") / "libfabric-stub.so"
    source = Path(__file__).with_name("stub_libfabric.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-w", "-o", str(out), str(source)], check=True)
    return str(out)


def with_stub(stub: str, code: str, **env: str) -> tuple[str, str]:
    """Runs `code` in a process that uses the stand-in; (its output, what the library was asked)."""
    program = f"import ctypes, json, fabricx as fx\nlib = ctypes.CDLL({stub!r}); lib.stub_said.restype = ctypes.c_char_p\n{code}\nprint('ASKED' + json.dumps(lib.stub_said().decode()))\n"
    e = {**os.environ, "PYTHONPATH": str(ROOT), "FABRICX_LIBFABRIC": stub, **env}
    p = subprocess.run([sys.executable, "-c", program], env=e, capture_output=True, text=True, timeout=60)
    assert p.returncode == 0, p.stderr
    out, _, asked = p.stdout.partition("ASKED")
    return out, json.loads(asked)


DEVICE = (
    "from fabricx.fabrics.base import Memory\n"
    "class Gpu:\n"
    "    __cuda_array_interface__ = {'data': (0x7f0000000000, False), 'shape': (4096,), 'typestr': '|u1', 'strides': None, 'version': 3}\n"
)


def test_efa_is_taken_and_told_what_it_needs(stub: str) -> None:
    out, asked = with_stub(
        stub, "with fx.TransferEngine('ofi') as e: print(e.groups[0].domains[0].info, e.groups[0].lands)"
    )
    assert "rdmap0s0-rdm" in out and out.strip().endswith("True")
    efa = -(0xEFA << 16)
    assert "setopt 11 size=1 value=0" in asked  # no shared memory inside efa
    assert "setopt 10 size=1 value=0" in asked  # no CUDA calls at registration
    assert f"setopt {efa + 4} size=1 value=1" in asked  # device RDMA
    assert f"setopt {efa} size=8 value=7" in asked  # receivers not ready: retried until our deadline
    assert "order=0" in asked and "api=10012" in asked  # no order asked for; API 1.18
    assert "wait=0" in asked  # no wait object: polled
    assert "source=1" in asked  # who wrote, since the immediate takes all of the CQ data
    assert "env shm=0 rdma=unset" in asked  # the variable aborts the process where the NIC cannot do it


def test_efa_direct_takes_immediates_without_receives(stub: str) -> None:
    _, asked = with_stub(stub, "with fx.TransferEngine('ofi'): pass", FABRICX_OFI_PROVIDER="efa-direct")
    assert f"setopt {-(0xEFA << 16) + 8} size=1 value=1" in asked and f"setopt {-(0xEFA << 16) + 4} " not in asked
    assert f"setopt {-(0xEFA << 16)} size=8 value=7" in asked and "source=1" in asked


def test_what_belongs_to_a_domain_is_closed_before_it(stub: str) -> None:
    """The buffers of control messages and what the user left registered; a real domain would be busy, and leak."""
    fabric, domain, mr = 1, 2, 12  # FI_CLASS_...
    _, asked = with_stub(stub, "with fx.TransferEngine('ofi') as e: e.reg_mr(bytearray(64))")
    opened = asked.count("reg 0x")
    closed = [int(line.split()[1]) for line in asked.splitlines() if line.startswith("close ")]
    assert (
        opened >= 3 and closed.count(mr) == opened
    )  # two of control messages, ours, and what the engine registers itself
    assert closed[-2:] == [domain, fabric] and closed.count(domain) == closed.count(fabric) == 1


def test_a_nic_that_fails_is_taken_out(stub: str) -> None:
    code = (
        "import time\n"
        "with fx.TransferEngine('ofi', nics=2) as e:\n"
        "    lib.stub_cq(-5)\n"
        "    end = time.monotonic() + 5\n"
        "    up = lambda: [n['up'] for n in e.stats()['groups'][0]['nics']]\n"
        "    while any(up()) and time.monotonic() < end: time.sleep(0.01)\n"
        "    print(up())\n"
    )
    out, _ = with_stub(stub, code)
    assert out.strip() == "[False, False]"


def test_device_memory_is_registered_by_its_interface(stub: str) -> None:
    code = (
        DEVICE
        + "with fx.TransferEngine('ofi', devices=('cuda:3',)) as e:\n    h, d = e.reg_mr(Gpu(), device='cuda:3'); print(d.device, h.memory.device)\n"
    )
    out, asked = with_stub(stub, code)
    assert "hmem=1" in asked and "regattr 0x7f0000000000 4096 iface=1 device=0" in asked and "cuda:0" in out


def test_device_memory_by_dma_buf(stub: str) -> None:
    code = (
        "from fabricx.fabrics.base import Memory\n"
        "with fx.TransferEngine('ofi', devices=('cuda:3',)) as e:\n"
        "    e._register(Memory(0x7f0000001000, 8192, device='cuda:3', dmabuf_fd=42, dmabuf_offset=4096), e.groups[0], 'gpu')\n"
    )
    _, asked = with_stub(stub, code)
    assert "regattr dmabuf fd=42 offset=4096 len=8192 base=0x7f0000001000 iface=1 device=3" in asked


def test_a_failed_device_registration_says_which_and_why(stub: str) -> None:
    code = (
        "from fabricx.fabrics.base import Memory\n"
        "with fx.TransferEngine('ofi', devices=('cuda:7',)) as e:\n"
        "    try: e._register(Memory(0x7f0000001000, 8192, device='cuda:7'), e.groups[0], 'gpu')\n"
        "    except fx.RegistrationError as x: print(x)\n"
    )
    out, _ = with_stub(stub, code)
    assert "8192 bytes at 0x7f0000001000" in out and "Invalid argument" in out


def test_a_provider_without_device_memory_says_so(stub: str) -> None:
    code = (
        "lib.stub_hmem(0)\n" + DEVICE + "with fx.TransferEngine('ofi', devices=('cuda:0',)) as e:\n"
        "    try: e.reg_mr(Gpu())\n"
        "    except fx.RegistrationError as x: print(x)\n"
    )
    out, _ = with_stub(stub, code)
    assert "host memory only" in out and "efa" in out


def test_ctypes_sees_the_stub(stub: str) -> None:
    assert ctypes.CDLL(stub).fi_version() == 2 << 16 | 1
