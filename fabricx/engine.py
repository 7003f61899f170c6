"""TransferEngine: the control path of the engine. The calls that must be quick are inherited from
fabricx._worker.EngineBase; here fabrics are opened, memory is registered, peers are resolved and failures handled."""

from __future__ import annotations

import atexit
import errno
import importlib
import itertools
import logging
import os
import resource
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from . import _worker, errors
from .address import MrDesc, NetAddr
from .config import Config
from .fabrics.base import Domain, Fabric, GroupSpec, LocalKey, Memory, RemoteKey
from .memory import HostBuffer, as_memory
from .topology import Topology

log = logging.getLogger("fabricx")

FABRICS = {
    "local": (".fabrics.local", "LocalFabric"),
    "ofi": (".fabrics.ofi", "OfiFabric"),
    "verbs": (".fabrics.verbs", "VerbsFabric"),
    "null": (".fabrics.null", "NullFabric"),
}
#: cores from which on the worker spins rather than sleeps by default
BUSY_CORES = 16
#: seconds that close() gives what is in flight when it is given no time-out
CLOSE_GRACE = 1.0
SCRATCH = 64
#: peers of a group that are resolved at the same time
_RESOLVERS = 128
#: imported regions from which on those whose owner took them back are looked for
_SWEEP = 256
_EV_PEER_LOST, _EV_NIC_DOWN, _EV_EARLY, _EV_DROPPED = 1, 2, 3, 4
_FE_PEER_LOST = 1
_NO_ID = 0xFFFFFFFF
_ALLOC_BIT, _INDEX_BITS, _GENERATIONS = 1 << 19, 14, 32

_engines: weakref.WeakSet[TransferEngine] = weakref.WeakSet()


def fabric_class(name: str) -> type[Fabric]:
    """The Fabric of a name, or FabricUnavailable."""
    if name not in FABRICS:
        raise errors.FabricUnavailable(f"there is no fabric {name!r}; known: {', '.join(FABRICS)}, auto")
    module, cls = FABRICS[name]
    try:
        return getattr(importlib.import_module(module, __package__), cls)
    except ModuleNotFoundError as e:
        if e.name is not None and e.name.startswith("fabricx."):
            raise errors.FabricUnavailable(f"fabric {name!r} is not part of this version") from e
        raise errors.FabricUnavailable(f"fabric {name!r} needs the package {e.name!r}, which is not installed") from e
    except ImportError as e:
        raise errors.FabricUnavailable(f"fabric {name!r} is not in this build: {e}") from e


def choose_fabric(config: Config) -> tuple[str, str]:
    """What "auto" means here, and why: RDMA or EFA hardware, else tcp if an address is configured, else local."""
    try:
        ofi = fabric_class("ofi")
        hardware, why = ofi.hardware(config)  # type: ignore[attr-defined]
        if hardware:
            return "ofi", why
    except errors.FabricUnavailable as e:
        why = str(e)
    if config.ofi_address:
        return "ofi", f"no EFA ({why}); an address to bind to is configured: {config.ofi_address}"
    return "local", f"no RDMA or EFA hardware ({why}) and no address to bind to is configured"


def _descriptors_hint() -> str:
    """What to say when this process has no descriptor left, the usual cause of a connection that does not come about."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENFILE):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return f"no descriptor is left here ({e.strerror}; the limit on open files is {limit}: ulimit -n)"
    return ""


class _Sources:
    """The numbers by which completions name the peer groups that sent them; asked by fabrics at each handshake.

    Apart from the engine, so that a fabric's thread does not keep a forgotten engine alive.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.numbers: dict[bytes, int] = {}
        self.addrs: list[NetAddr | None] = []
        self.met: dict[bytes, int] = {}  # when there was a handshake last, in ns
        self.lost: set[int] = set()  # told already; each NIC reports it

    def number(self, netaddr: bytes) -> int:
        with self.lock:
            self.met[netaddr] = time.monotonic_ns()
            n = self.numbers.get(netaddr)
            if n is None:
                n = self.numbers[netaddr] = len(self.addrs)
                try:
                    self.addrs.append(NetAddr.from_bytes(netaddr))
                except errors.ProtocolError:
                    self.addrs.append(None)
            self.lost.discard(n)
            return n

    def met_since(self, number: int, when: int) -> bool:
        """Whether the group has shaken hands again after a moment, in ns of the monotonic clock."""
        addr = self.addr(number)
        return addr is not None and self.met.get(addr.to_bytes(), 0) > when

    def addr(self, number: int) -> NetAddr | None:
        return self.addrs[number] if number < len(self.addrs) else None


class _Peer:
    """A remote group as one local group sees it: its reference for the worker, and a path for each pair of NICs."""

    __slots__ = ("lock", "paths", "ref")

    def __init__(self, ref: _worker.PeerRef) -> None:
        self.ref = ref
        self.lock = threading.Lock()
        self.paths: list[tuple[int, int, int]] = []  # local NIC, fabric's index, remote NIC


class PeerGroup:
    """A fixed set of peers, resolved once; made by TransferEngine.add_peer_group()."""

    def __init__(self, engine: TransferEngine, addrs: Sequence[NetAddr]) -> None:
        self._engine = weakref.ref(engine)
        self.addrs = tuple(addrs)
        self._set = frozenset(addrs)
        self._freed = False

    def _usable(self) -> None:
        if self._freed:
            raise errors.UnknownPeer("the peer group was freed")

    def _check(self, desc: MrDesc) -> None:
        if desc.owner not in self._set:
            raise errors.UnknownPeer(f"{desc.owner} is not in this group of {len(self.addrs)} peers")

    def free(self) -> None:
        """Forget the group. Connections stay for other uses."""
        self._freed = True

    def __len__(self) -> int:
        return len(self.addrs)

    def __repr__(self) -> str:
        return f"PeerGroup({len(self.addrs)} peers)"


class RecvPool:
    """A rotating pool of receive buffers; made by TransferEngine.submit_recvs()."""

    def __init__(
        self, engine: TransferEngine, number: int, length: int, count: int, cb: Callable[[memoryview, NetAddr | None], Any]
    ) -> None:
        self.length, self.count, self.cb = length, count, cb
        self._number, self._left = number, count
        # re-entrant: the end of a view that was kept may come in the middle of it, with the collector
        self._lock = threading.RLock()
        self._engine = weakref.ref(engine)
        self._stride = (length + 63) & ~63
        self._buffer = HostBuffer(max(64, self._stride * count))
        self._lent: dict[int, weakref.ref[np.ndarray]] = {}  # buffers of which a callback has kept a part
        self._handle, _ = engine.reg_mr(self._buffer, name="receive pool")
        self._posted: list[_worker.Transfer] = []
        self.freed = False

    def _post(self) -> None:
        engine = self._engine()
        assert engine is not None
        for i in range(self.count):
            self._posted.append(engine._post_recv(self._handle, i * self._stride, self.length, self._number, i))

    def _deliver(self, engine: TransferEngine, index: int, length: int, source: NetAddr | None) -> None:
        start = index * self._stride
        whole = self._buffer.array[start : start + length]
        view = memoryview(whole)
        alive = weakref.ref(whole)
        try:
            self.cb(view, source)
        finally:
            try:
                view.release()
            except BufferError:  # an array was made of it
                pass
            del view, whole
            kept = alive()
            if kept is None:
                self._again(index)
            else:
                self._lent[index] = weakref.ref(kept, lambda _: self._late(index))
                del kept

    def _again(self, index: int) -> bool:
        """Nobody looks at a buffer any more: it is posted again, or ends with its pool."""
        engine = self._engine()
        with self._lock:
            if engine is None or engine.closed:
                return True
            if not self.freed:
                engine._repost_recv(self._posted[index])
                return True
            self._handle.group.end_recv(self._posted[index])
        self._over(engine, 1)
        return False

    def _late(self, index: int) -> None:
        """The last part of a message that a callback had kept is gone; whoever dropped it may hold any lock."""
        self._lent.pop(index, None)
        if self.freed:
            threading.Thread(target=self._again, args=(index,), name="fabricx receive pool", daemon=True).start()
        else:
            self._again(index)

    def free(self) -> None:
        """Take the buffers back. Idempotent; from any thread, also from the callback.

        A message that is being received, or waits for its callback, is still handed to it; the memory is given back with
        the last of them. Senders with a message that is longer than all other buffers here get MessageTooLong; if there
        are no others, they are held back until there are or their time is up. On the local fabric a message may be on its way
        already, its sender done: if it is too long for what is left, it is dropped, and `engine.on_error` told.
        """
        engine = self._engine()
        with self._lock:
            if self.freed:
                return
            self.freed = True
        if engine is None or engine.closed or self._handle.group.forked():
            return
        group, n = self._handle.group, 0
        with engine._recv_lock:
            longest = max((p.length for p in engine._pools.values() if p is not self), default=0)
            for t in self._posted:
                if group.withdraw(t, longest):
                    group.end_recv(t)
                    n += 1
            group.longest_recv(longest)
        self._over(engine, n)

    def _over(self, engine: TransferEngine, n: int) -> None:
        """So many buffers have ended; with the last one the memory goes."""
        with self._lock:
            self._left -= n
            if n == 0 or self._left:
                return
        with engine._recv_lock:
            engine._pools.pop(self._number, None)
        engine.dereg_mr(self._handle)
        self._posted.clear()
        del self._handle, self._buffer


class UvmWatcher:
    """A watched 64-bit word; made by TransferEngine.alloc_uvm_watcher().

    Attributes
    ----------
    addr : address of the word, for kernels and native code.
    word : np.ndarray of one uint64, the word itself. Increment it; the callback gets ``(old, new)``.
    """

    def __init__(self, engine: TransferEngine, cb: Any, word: np.ndarray | int | None) -> None:
        self._engine = weakref.ref(engine)
        self.cb = cb
        if word is None:
            self._buffer = HostBuffer(64)
            self.word: np.ndarray | None = self._buffer.array[:8].view(np.uint64)
            self.addr = self._buffer.addr
        elif isinstance(word, int):
            self.word, self.addr = None, as_memory(word, 8).addr
        else:
            mem = as_memory(word, 8)
            self.word, self.addr = word, mem.addr
        native = cb if isinstance(cb, _worker.NativeCallback) else None
        if native is None and not callable(cb):
            raise TypeError(f"cb must be callable or a NativeCallback, not {type(cb).__name__}")
        address, arg = native.target if native is not None else (0, 0)
        self._number: int | None = engine._watch_thread().add(self.addr, address, arg)
        engine._watchers[self._number] = self

    def free(self) -> None:
        """Stop watching; the word is not read after this returns."""
        engine, number, self._number = self._engine(), self._number, None
        if engine is not None and number is not None:
            engine._watchers.pop(number, None)
            if engine._watch is not None:
                engine._watch.remove(number)


class _Sink:
    """What the callback thread calls. It holds the engine weakly, so that a forgotten engine can be collected."""

    def __init__(self, engine: TransferEngine) -> None:
        self._ref = weakref.ref(engine)

    def __getattr__(self, name: str) -> Any:
        engine = self._ref()
        return getattr(engine, name) if engine is not None else lambda *a: None


class TransferEngine(_worker.EngineBase):
    """One-sided writes, messages and counted immediates between processes.

    Parameters
    ----------
    fabric : "local", "ofi", "verbs", "null" or "auto"
        One asked for by name that is not there raises FabricUnavailable; it is never replaced.
    nics : int or sequence of str
        NICs a device.
    devices : sequence of str
        One domain group, with a worker thread of its own, for each; ``"cpu:0"``, ``"cuda:1"``.
    progress : "thread" or "caller"
        Who drives the NICs: the worker, or the thread that is inside `wait()` (the worker then sleeps, and wakes for
        deadlines and for what arrives while nobody waits).
    polling : "busy" or "adaptive", optional
        Spin always, or spin a little, then yield, then sleep. By number of cores if not given.
    config : Config, optional
    chaos : Chaos, optional
        Only for the local fabric.
    name : str, optional
        For messages.

    Raises
    ------
    FabricUnavailable, OutOfRange
    """

    def __init__(
        self,
        fabric: str = "auto",
        *,
        nics: int | Sequence[str] = 1,
        devices: Sequence[str] = ("cpu:0",),
        progress: str = "thread",
        polling: str | None = None,
        config: Config | None = None,
        chaos: Any = None,
        name: str | None = None,
    ) -> None:
        self._closing = threading.Lock()
        self._over = True  # until it is open
        self._groups_open: list[_worker.Group] = []
        self._domains: list[list[Domain]] = []
        self._fabric: Fabric | None = None
        self._watch: Any = None
        self._cb_thread: threading.Thread | None = None
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"config must be a fabricx.Config, not {type(config).__name__}")
        self.config = config or Config.from_env()
        if progress not in ("thread", "caller"):
            raise errors.OutOfRange(f'progress is {progress!r}; it must be "thread" or "caller"')
        if polling not in (None, "busy", "adaptive"):
            raise errors.OutOfRange(f'polling is {polling!r}; it must be "busy" or "adaptive"')
        devices = (devices,) if isinstance(devices, str) else tuple(devices)
        nics = (nics,) if isinstance(nics, str) else nics
        if not devices:
            raise errors.OutOfRange("devices is empty")
        if isinstance(nics, int) and nics < 1 or not isinstance(nics, int) and not nics:
            raise errors.OutOfRange(f"nics is {nics!r}; a device has at least one")
        if len(set(devices)) != len(devices):
            raise errors.OutOfRange(f"devices {list(devices)} name one twice")
        cores = len(os.sched_getaffinity(0))
        self.progress = progress
        self.polling = polling or ("busy" if cores >= BUSY_CORES and progress == "thread" else "adaptive")
        why = "asked for"
        if fabric == "auto":
            fabric, why = choose_fabric(self.config)
            log.info("fabric %s: %s", fabric, why)
        if chaos is not None and fabric != "local":
            raise errors.OutOfRange(f"chaos is for the local fabric, not for {fabric!r}")
        if chaos is not None and not hasattr(chaos, "fail_nic"):
            raise TypeError(f"chaos must be a fabricx.Chaos, not {type(chaos).__name__}")
        if chaos is not None and chaos.fail_nic is not None:
            failing = chaos.fail_nic if isinstance(chaos.fail_nic, int) else chaos.fail_nic[0]
            there = nics if isinstance(nics, int) else len(nics)
            if not 0 <= failing < there:
                raise errors.OutOfRange(f"chaos: NIC {failing} is to fail; there are {there}")
        self.fabric, self.fabric_reason, self.name = fabric, why, name or f"pid {os.getpid()}"
        self.on_error: Callable[[BaseException], Any] | None = None
        self.on_peer_lost: Callable[[NetAddr], Any] | None = None
        self._lock = threading.RLock()
        self._sources = _Sources()
        self._peers: dict[tuple[int, NetAddr], _Peer] = {}
        self._peer_by_id: list[_Peer] = []
        self._refs: dict[tuple[int, NetAddr], _worker.PeerRef] = {}  # the last one to each peer
        self._remotes: dict[tuple[int, NetAddr, tuple[int, ...]], _worker.RemoteMr] = {}
        self._sweep_at = _SWEEP
        self._graves: list[_worker.RemoteMr] = []
        self._handles: dict[int, _worker.MrHandle] = {}
        self._pools: dict[int, RecvPool] = {}
        self._pool_numbers = itertools.count()
        self._recv_lock = threading.Lock()  # posting and taking back receives
        self._watchers: dict[int, UvmWatcher] = {}
        self._expecting: dict[NetAddr, list[_worker.Transfer]] = {}
        self._expecting_purge: dict[NetAddr, int] = {}  # number of them from which on those that have ended are let go
        self._imm_free: deque[int] = deque(range(1 << _INDEX_BITS))
        self._imm_gen = bytearray(1 << _INDEX_BITS)
        self._imm_live: set[int] = set()
        self._scratches: list[_worker.MrHandle] = []
        self._cbq = _worker.CallbackQueue()
        self.addresses: list[NetAddr] = []
        try:
            self._open(fabric, nics, devices, cores, chaos)
        except BaseException:
            self._tear_down(0.0)
            raise
        self._over = False
        _engines.add(self)

    # ------------------------------------------------------------------ life

    def _open(self, fabric: str, nics: int | Sequence[str], devices: Sequence[str], cores: int, chaos: Any) -> None:
        cls = fabric_class(fabric)
        ok, why = cls.available()
        if not ok:
            raise errors.FabricUnavailable(f"fabric {fabric!r}: {why}")
        self._fabric = cls()
        if isinstance(nics, int) and not 1 <= nics <= 16:
            raise errors.OutOfRange(f"nics is {nics}; it must be within 1 .. 16")
        pins = self._pins(devices, cores)
        for i, device in enumerate(devices):
            group = _worker.Group(
                self,
                i,
                device,
                self._cbq,
                caller=self.progress == "caller",
                busy=self.polling == "busy",
                spin=self.config.spin,
                yields=self.config.yields,
                core=pins[i],
                split_min=self.config.split_min,
                max_early=self.config.max_early,
            )
            incarnation = secrets.randbits(64)
            box: list[bytes] = []
            spec = GroupSpec(
                device=device,
                nics=nics,
                address=lambda box=box: box[0],
                source_of=self._sources.number,
                lock=group.lock,
                kick=group.kick,
                config=self.config,
                chaos=chaos,
                incarnation=incarnation,
            )
            domains = self._fabric.open(spec)
            self._domains.append(domains)
            addr = NetAddr(
                fabric=fabric,
                incarnation=incarnation,
                device=device,
                host=socket.gethostname(),
                pid=os.getpid(),
                nics=tuple(d.addr for d in domains),
            )
            box.append(addr.to_bytes())
            group.start(domains, addr)
            self._groups_open.append(group)
            self.addresses.append(addr)
        self._init_base(self._groups_open, self.config.timeout)
        self._cb_thread = threading.Thread(
            target=self._cbq.run, args=(_Sink(self),), name=f"fabricx callbacks ({self.name})", daemon=True
        )
        self._cb_thread.start()
        for group in self._groups_open:
            buffer = HostBuffer(SCRATCH)
            self._scratches.append(self._register(as_memory(buffer), group, "scratch")[0])

    def _pins(self, devices: Sequence[str], cores: int) -> list[int]:
        """The core for each device's worker: near the device, a different one for each, where there are enough."""
        if not self.config.pin or cores <= 4:
            return [-1] * len(devices)
        topology = Topology.read(nvml=None if any(d.startswith("cuda") for d in devices) else False)
        pins: list[int] = []
        for device in devices:
            try:
                near = topology.cores(device)
            except errors.OutOfRange as e:  # "cpu:1" may stand for a second group on a machine with one node
                log.info("%s: %s; its worker is pinned as for cpu:%d", self.name, e, topology.nodes[0].number)
                near = topology.cores(f"cpu:{topology.nodes[0].number}")
            pins.append(next((c for c in near if c not in pins), near[0]))
        return pins

    @property
    def address(self) -> NetAddr:
        """Address of the first device's group."""
        return self.addresses[0]

    def close(self, timeout: float | None = None) -> None:
        """End the engine. Safe at any time, from any thread, more than once.

        Expectations end at once with EngineClosed. What has been posted gets `timeout` seconds (1 by default) to
        complete; what is left then fails with EngineClosed. When this returns, nothing can land in this process's
        memory through the engine any more.
        """
        grace = CLOSE_GRACE if timeout is None else float(timeout)
        # a callback must not wait for a thread that waits for callbacks to end
        mine = threading.current_thread() is not self._cb_thread
        if not self._closing.acquire(blocking=mine):
            return
        try:
            if self._over:
                return
            self._shut_base()
            if self._groups_open and self._groups_open[0].forked():
                self._over = True
                self._abandon()
                return
            self._tear_down(grace)
        finally:
            self._closing.release()

    def _tear_down(self, grace: float) -> None:
        self._shut_base()
        groups = self._groups_open
        for g in groups:
            g.shut()
        end = time.monotonic() + grace
        interrupted: BaseException | None = None
        try:
            while any(g.busy for g in groups) and time.monotonic() < end:
                time.sleep(0.0005)
        except BaseException as e:  # Ctrl-C ends the patience, not the closing
            interrupted = e
        if self._watch is not None:
            self._watch.stop()
        for g in groups:
            g.stop()
        for domains in self._domains:
            for d in domains:
                try:
                    d.close()
                except Exception:
                    log.exception("closing %s", d.info.name)
        for g in groups:
            g.settle()
        if self._fabric is not None:
            self._fabric.close()
        if self._cb_thread is not None:
            self._cbq.stop()
            if threading.current_thread() is not self._cb_thread:
                self._cb_thread.join(10.0)
        self._pools.clear()
        self._handles.clear()
        self._over = True
        if interrupted is not None:
            raise interrupted

    def _abandon(self) -> None:
        """In a forked child: the threads are not here; descriptors are closed by the fabrics' own fork handlers."""
        if self._watch is not None:
            self._watch.abandon()

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> TransferEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        import asyncio

        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def __del__(self) -> None:
        if not getattr(self, "_over", True):
            import warnings

            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            self.close(0.0)

    def __repr__(self) -> str:
        return f"<TransferEngine {self.name}: {self.fabric}, {len(self.addresses)} groups{', closed' if self.closed else ''}>"

    # ------------------------------------------------------------------ memory

    def alloc(self, nbytes: int) -> HostBuffer:
        """Zeroed host memory that peers on this host can map: writes into it are plain copies there."""
        self._alive()
        return HostBuffer(nbytes)

    def _group(self, device: str | None) -> _worker.Group:
        if device is None:
            return self._groups_open[0]
        for g in self._groups_open:
            if g.device == device:
                return g
        kind = device.partition(":")[0]
        same = [g for g in self._groups_open if g.device.partition(":")[0] == kind]
        if same:
            return same[0]
        if kind == "cuda" or device == "cpu":
            return self._groups_open[0]
        raise errors.OutOfRange(f"no group for device {device!r}; this engine has {[g.device for g in self._groups_open]}")

    def reg_mr(
        self, memory: Any, length: int | None = None, *, device: str | None = None, name: str | None = None
    ) -> tuple[_worker.MrHandle, MrDesc]:
        """Register memory with every NIC of its device.

        Parameters
        ----------
        memory : HostBuffer, torch tensor, NumPy array, bytes-like, DLPack object, or int
            C-contiguous; an int is an address and needs `length`.
        length : int, optional
            Bytes.
        device : str, optional
            Whose group; found from the memory if not given.
        name : str, optional
            For error messages, at both ends.

        Returns
        -------
        (MrHandle, MrDesc)
            The handle is the source of writes from here; the descriptor (`to_bytes()`) lets others write here.

        Raises
        ------
        RegistrationError, NotContiguous, OutOfRange, EngineClosed
        """
        self._alive()
        for what, value, kind in (("device", device, str), ("name", name, str), ("length", length, int)):
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{what} must be {kind.__name__}, not {type(value).__name__}")
        mem = as_memory(memory, length, device, mapped=self.fabric != "null")  # which touches nothing
        return self._register(mem, self._group(device or mem.device), name or "")

    def _register(self, mem: Memory, group: _worker.Group, name: str) -> tuple[_worker.MrHandle, MrDesc]:
        keys: list[LocalKey] = []
        try:
            for d in group.domains:
                keys.append(d.reg(mem))
        except BaseException:
            for d, k in zip(group.domains, keys, strict=False):
                d.dereg(k, time.monotonic() + self.config.connect_timeout)
            raise
        handle = _worker.MrHandle(group, mem, keys, name)
        desc = MrDesc(
            owner=group.address,
            base=mem.addr,
            length=mem.length,
            rkeys=tuple(k.rkey for k in keys),
            device=mem.device,
            name=name,
        )
        handle.set_desc(desc)
        with self._lock:
            self._handles[id(handle)] = handle
        return handle, desc

    def dereg_mr(self, handle: _worker.MrHandle, *, wait: bool = True, timeout: float | None = None) -> None:
        """Undo reg_mr. When it returns, nothing can land in the memory any more and nothing reads it.

        With transfers in flight it waits for them (`wait=True`) or raises InUse. TransferTimeout: a transfer, or a
        peer that is in the middle of writing, did not end in time; the memory must not be reused (it stays registered).
        """
        end = time.monotonic() + (self.config.timeout if timeout is None else timeout)
        if self._over:
            return  # close() has given everything back
        self._groups_open[0].guard_fork()
        if not isinstance(handle, _worker.MrHandle):
            raise TypeError(f"the handle must be an MrHandle, as reg_mr returns it, not {type(handle).__name__}")
        with self._lock:
            if self._handles.get(id(handle)) is not handle:
                raise errors.UnregisteredLocal(f"{handle!r} is not registered with this engine (any more)")
            if not wait and handle.inflight:
                raise errors.InUse(f"{handle!r} is used by {handle.inflight} transfers")
        handle.bury()
        pause = 1e-5  # seconds
        try:
            while handle.inflight:
                if time.monotonic() > end:
                    raise errors.TransferTimeout(f"{handle!r} is still used by {handle.inflight} transfers")
                time.sleep(pause)
                pause = min(pause * 2, 0.005)
            for d, k in zip(handle.group.domains, handle.keys, strict=True):
                d.dereg(k, end)
        except errors.TransferTimeout:
            handle.bury(False)
            raise
        with self._lock:
            self._handles.pop(id(handle), None)

    # ------------------------------------------------------------------ peers

    def _peer_paths(self, addr: NetAddr, group: _worker.Group, timeout: float | None = None) -> _Peer:
        """The peer, connected: any number of threads asking for one make one connection."""
        key = (group.index, addr)
        with self._lock:
            peer = self._peers.get(key)
            if peer is None:
                if not isinstance(addr, NetAddr):
                    raise TypeError(f"a peer is named by its NetAddr, not by {type(addr).__name__}")
                if addr.fabric != self.fabric:
                    raise errors.UnknownPeer(f"{addr} is on fabric {addr.fabric!r}, this engine on {self.fabric!r}")
                peer = self._peers[key] = _Peer(_worker.PeerRef(group, addr, len(self._peer_by_id)))
                earlier = self._refs.get(key)
                if earlier is not None:
                    peer.ref.inherit(earlier)
                self._refs[key] = peer.ref
                self._peer_by_id.append(peer)
        if peer.paths:
            return peer
        deadline = time.monotonic() + (self.config.connect_timeout if timeout is None else timeout)
        mine = False
        try:
            mine = peer.lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
            if not mine:
                raise errors.TransferTimeout(f"another thread is still connecting to {addr}")
            if not peer.paths:
                self._connect(peer, addr, group, deadline)
        except BaseException as e:
            with self._lock:
                if self._peers.get(key) is peer:
                    del self._peers[key]
            hint = _descriptors_hint() if isinstance(e, (errors.FabricxError, OSError)) else ""
            if isinstance(e, OSError) and e.errno:
                raise errors.ProviderError(e.errno, f"connecting to {addr}: {e.strerror}; {hint}".rstrip("; ")) from e
            if hint:
                raise type(e)(f"{e}; {hint}") from e
            raise
        finally:
            if mine:
                peer.lock.release()
        return peer

    def _connect(self, peer: _Peer, addr: NetAddr, group: _worker.Group, deadline: float) -> None:
        n, m = len(group.domains), len(addr.nics)
        if not 1 <= m <= 16:
            raise errors.UnknownPeer(f"{addr} has {m} NICs; 1 .. 16 are possible")
        raw = addr.to_bytes()
        paths = []
        for k in range(max(n, m)):
            i, j = k % n, k % m
            index = group.domains[i].connect(addr.nics[j], raw, deadline)
            peer.ref.attach(i, index, k < n and j == 0 or k == i and k < n)
            paths.append((i, index, j))
        peer.paths = paths

    def _peer(self, addr: NetAddr, group: _worker.Group) -> _worker.PeerRef:
        return self._peer_paths(addr, group).ref

    def _resolve(self, desc: MrDesc, group: _worker.Group) -> _worker.RemoteMr:
        """What `desc` is to `group`: connect and import on first use."""
        self._alive()
        key = (group.index, desc.owner, desc.rkeys)
        with self._lock:
            remote = self._remotes.get(key)
            known = self._peers.get((group.index, desc.owner))
            if remote is not None and (known is None or remote.peer is not known.ref):
                self._graves.append(self._remotes.pop(key))  # of a connection that was removed meanwhile
                remote = None
        if remote is None:
            peer = self._peer_paths(desc.owner, group)
            deadline = time.monotonic() + self.config.connect_timeout
            if len(desc.rkeys) != len(desc.owner.nics):
                raise errors.ProtocolError(f"{desc!r} has {len(desc.rkeys)} keys for {len(desc.owner.nics)} NICs")
            with peer.lock:
                remote = self._remotes.get(key)
                if remote is None:
                    remote = self._import(desc, group, peer, deadline)
                    with self._lock:
                        known = self._peers.get((group.index, desc.owner))
                        if known is not peer:
                            raise errors.PeerLostError(f"{desc.owner} was removed meanwhile")
                        self._remotes[key] = remote
                        if len(self._remotes) >= self._sweep_at:
                            self._sweep()
        desc._remote = remote
        return remote

    def _sweep(self) -> None:
        """Forgets regions that their owners have taken back. The lock is held."""
        for key, remote in list(self._remotes.items()):
            if remote.inflight == 0 and all(d.is_gone(index, k) for d, index, k in remote.keys):
                with remote.group.lock():
                    if remote.inflight:
                        continue
                    remote.bury()
                del self._remotes[key]
                for d, index, k in remote.keys:
                    d.release_mr(index, k)
        self._sweep_at = max(_SWEEP, 2 * len(self._remotes))

    def _import(self, desc: MrDesc, group: _worker.Group, peer: _Peer, deadline: float) -> _worker.RemoteMr:
        keys: list[tuple[Domain, int, RemoteKey]] = []
        paths = []
        try:
            for i, index, j in peer.paths:
                d = group.domains[i]
                if not group.nic_up(i):
                    continue
                k = d.import_mr(index, desc.rkeys[j], desc.base, desc.length, deadline)
                keys.append((d, index, k))
                paths.append((i, index, k.base, k.key))
        except BaseException:
            for d, index, k in keys:
                d.release_mr(index, k)
            raise
        if not paths:
            raise errors.NicFailed(f"no NIC of {group.device} is left to reach {desc.owner}")
        own = any(desc.owner == g.address for g in self._groups_open)
        return _worker.RemoteMr(group, peer.ref, desc.length, paths, keys, desc.base if own else 0)

    def connect(self, addr: NetAddr, timeout: float | None = None) -> None:
        """Shake hands with a peer ahead of time, or again after it was lost.

        Raises
        ------
        PeerLostError, TransferTimeout, UnknownPeer
        """
        self._alive()
        group = self._groups_open[0]
        with self._lock:
            peer = self._peers.get((group.index, addr))
            if peer is not None and peer.ref.lost:
                self._forget(addr)
        self._peer_paths(addr, group, timeout)

    def remove_peer(self, addr: NetAddr, *, wait: bool = True, timeout: float | None = None) -> None:
        """Forget a peer and cut the connection; connect() makes a new one.

        With transfers in flight it waits for them (`wait=True`) or raises InUse.

        Raises
        ------
        UnknownPeer, InUse, TransferTimeout
        """
        self._alive()
        end = time.monotonic() + (self.config.timeout if timeout is None else timeout)
        mine = [(k, p) for k, p in list(self._peers.items()) if k[1] == addr]
        if not mine:
            raise errors.UnknownPeer(f"{addr} is not connected")
        for k, p in mine:
            while self._peer_inflight(k[0], addr, p):
                if not wait:
                    raise errors.InUse(f"transfers to {addr} are in flight")
                if time.monotonic() > end:
                    raise errors.TransferTimeout(f"transfers to {addr} are still in flight")
                time.sleep(0.001)
        self._forget(addr)

    def _peer_inflight(self, index: int, addr: NetAddr, peer: _Peer) -> int:
        n = peer.ref.inflight
        with self._lock:
            for (i, owner, _), r in self._remotes.items():
                if i == index and owner == addr:
                    n += r.inflight
        return n

    def _forget(self, addr: NetAddr) -> None:
        with self._lock:
            for key in [k for k in self._peers if k[1] == addr]:
                peer = self._peers.pop(key)
                group = self._groups_open[key[0]]
                group.lose(peer.ref, _NO_ID)
                for rkey in [k for k in self._remotes if k[0] == key[0] and k[1] == addr]:
                    remote = self._remotes.pop(rkey)
                    self._graves.append(remote)  # the worker may still hold a pointer into it
                    for d, index, k in remote.keys:
                        d.release_mr(index, k)
                self._graves = [r for r in self._graves if r.inflight]
                for i, index, _ in peer.paths:
                    group.domains[i].disconnect(index)

    def add_peer_group(self, addrs: Iterable[NetAddr], timeout: float | None = None) -> PeerGroup:
        """Resolve a fixed set of peers once, each within `timeout` seconds in all.

        Raises
        ------
        PeerLostError, TransferTimeout
            naming the peers that could not be reached.
        """
        self._alive()
        addrs = list(addrs)
        deadline = time.monotonic() + (self.config.connect_timeout if timeout is None else timeout)

        def reach(addr: NetAddr) -> BaseException | None:
            try:
                self._peer_paths(addr, self._groups_open[0], max(0.001, deadline - time.monotonic()))
            except (errors.PeerLostError, errors.TransferTimeout, errors.UnknownPeer) as e:
                return e
            return None

        unknown = [a for a in dict.fromkeys(addrs) if not self._is_connected(a)]
        failed: list[tuple[NetAddr, BaseException]] = []
        if unknown:
            # at once, so that those who do not answer take no time from the others
            with ThreadPoolExecutor(min(len(unknown), _RESOLVERS), "fabricx resolve") as pool:
                failed = [(a, e) for a, e in zip(unknown, pool.map(reach, unknown), strict=True) if e is not None]
        if failed:
            first = failed[0][1]
            names = ", ".join(str(a) for a, _ in failed)
            raise type(first)(f"{len(failed)} of {len(addrs)} peers cannot be reached: {names}: {first}") from first
        return PeerGroup(self, addrs)

    def _is_connected(self, addr: NetAddr) -> bool:
        with self._lock:
            peer = self._peers.get((0, addr))
        return peer is not None and bool(peer.paths)

    def _scratch(self) -> _worker.MrHandle:
        return self._scratches[0]

    # ------------------------------------------------------------------ messages

    def submit_recvs(self, length: int, count: int, cb: Callable[[memoryview, NetAddr | None], Any]) -> RecvPool:
        """A rotating pool of receive buffers.

        Parameters
        ----------
        length : bytes of a buffer; longer messages fail at their sender.
        count : number of buffers; while all are in use, senders are held back.
        cb : called on the callback thread with the message and the sender's NetAddr. The memoryview is released when it
            returns, and the buffer posted again; what was made of it before (slices, arrays) stays as it is, and keeps the
            buffer from being used again as long as it lives.
        """
        self._alive()
        if not 1 <= length < 1 << 48:
            raise errors.OutOfRange(f"length is {length}; a receive buffer has 1 .. 2**48 - 1 bytes")
        if not 1 <= count <= 65536:
            raise errors.OutOfRange(f"count is {count}; a pool has 1 .. 65536 buffers")
        if not callable(cb):
            raise TypeError(f"cb must be callable, not {type(cb).__name__}")
        with self._recv_lock:
            number = next(self._pool_numbers)
            pool = self._pools[number] = RecvPool(self, number, length, count, cb)
            pool._post()
        return pool

    def _received(self, number: int, index: int, length: int, source: int) -> None:
        pool = self._pools.get(number)
        if pool is not None:
            pool._deliver(self, index, length, self._sources.addr(source))

    # ------------------------------------------------------------------ immediates and watchers

    def alloc_imm(self) -> int:
        """A number no one else here uses, with a generation: late arrivals of an earlier use are dropped and counted
        as stale. Hand it to the peers that shall write with it."""
        self._alive()
        with self._lock:
            if not self._imm_free:
                raise errors.OutOfRange(f"all {1 << _INDEX_BITS} immediates of this engine are allocated")
            index = self._imm_free.popleft()
            number = _ALLOC_BIT | self._imm_gen[index] << _INDEX_BITS | index
            for g in self._groups_open:
                g.imm_set(number, True)
            self._imm_live.add(number)
            return number

    def free_imm(self, imm: int) -> None:
        """Give a number back, or forget what an explicit one has counted. Who still expects it is cancelled."""
        self._alive()
        with self._lock:
            if imm & _ALLOC_BIT:
                if imm not in self._imm_live:
                    raise errors.OutOfRange(f"immediate {imm} is not allocated here")
                self._imm_live.discard(imm)
                index = imm & ((1 << _INDEX_BITS) - 1)
                self._imm_gen[index] = (self._imm_gen[index] + 1) % _GENERATIONS
                self._imm_free.append(index)
            elif not 0 <= imm < _ALLOC_BIT:
                raise errors.OutOfRange(f"imm is {imm}; explicit immediates are within 0 .. {_ALLOC_BIT - 1}")
            for g in self._groups_open:
                g.imm_set(imm, False)

    def imm_count(self, imm: int, *, device: str | None = None) -> int:
        """Writes with `imm` that have landed and that no expectation has consumed."""
        self._alive()
        if not 0 <= imm < 1 << 20:
            raise errors.OutOfRange(f"imm is {imm}; it must be within 0 .. {(1 << 20) - 1}")
        return self._group(device).imm_count(imm)

    def alloc_uvm_watcher(self, cb: Any, *, word: Any = None) -> UvmWatcher:
        """Watch a 64-bit word that a GPU or a CPU increments.

        Parameters
        ----------
        cb : callable ``(old, new)`` on the callback thread, or a NativeCallback to a C ``void f(uint64_t arg, uint64_t old,
            uint64_t new)`` called by the watcher's thread without the GIL. Changes may coalesce.
        word : optional address, or array of one uint64, to watch instead of a word of our own.
        """
        self._alive()
        return UvmWatcher(self, cb, word)

    def _watch_thread(self) -> Any:
        with self._lock:
            if self._watch is None:
                from . import _watcher

                self._watch = _watcher.WatchThread(self._cbq, self.polling == "busy")
            return self._watch

    def _watched(self, number: int) -> None:
        change = self._watch.changed(number)
        watcher = self._watchers.get(number)
        if change is not None and watcher is not None:
            watcher.cb(*change)

    def _watch_peers(self, transfer: _worker.Transfer, peers: Iterable[NetAddr]) -> None:
        with self._lock:
            for addr in peers:
                if self._sources.numbers.get(addr.to_bytes(), _NO_ID) in self._sources.lost:
                    raise errors.PeerLostError(f"{addr} is lost already")
                for group in self._groups_open:
                    peer = self._peers.get((group.index, addr))
                    if peer is not None and peer.ref.lost:
                        raise errors.PeerLostError(f"{addr} is lost already")
                waiting = self._expecting.setdefault(addr, [])
                if len(waiting) >= self._expecting_purge.get(addr, 64):
                    waiting[:] = [t for t in waiting if not t.done()]
                    self._expecting_purge[addr] = max(64, 2 * len(waiting))
                waiting.append(transfer)

    # ------------------------------------------------------------------ failures, all on the callback thread

    def _callback_failed(self, error: BaseException) -> None:
        log.error("a callback raised", exc_info=error)
        self._report(error)

    def _report(self, error: BaseException) -> None:
        if self.on_error is not None:
            try:
                self.on_error(error)
            except BaseException:  # the callback thread goes on, whatever it was
                log.exception("on_error raised")

    def _event(self, kind: int, nic: int, peer: int, source: int, group: int, when: int) -> None:
        if kind == _EV_PEER_LOST:
            self._lost(self._groups_open[group], peer, source, when)
        elif kind == _EV_NIC_DOWN:
            name = f"fabricx fail-over ({self.name})"
            threading.Thread(target=self._fail_over, args=(self._groups_open[group], nic), name=name, daemon=True).start()
        elif kind == _EV_DROPPED:
            addr = self._sources.addr(source) or "an unknown peer"
            self._report(
                errors.MessageTooLong(
                    f"a message of {peer} bytes from {addr} was dropped: it was on its way to a pool that was freed, and no other has buffers so long"
                )
            )
        elif kind == _EV_EARLY:
            addr = self._sources.addr(source) or "an unknown peer"
            self._report(errors.TooManyEarly(f"{addr} sent immediates that nobody expects, more than {self.config.max_early}"))

    def _lost(self, group: _worker.Group, peer_id: int, source: int, when: int) -> None:
        addr: NetAddr | None = None
        if peer_id < len(self._peer_by_id):
            ref = self._peer_by_id[peer_id].ref
            addr = ref.addr
            ref.mark_lost()
            if source == _NO_ID:
                source = self._sources.numbers.get(addr.to_bytes(), _NO_ID)
        if self._sources.addr(source) is not None:
            addr = addr or self._sources.addr(source)
            group.forget_source(source, lambda: self._sources.met_since(source, when))
            if self._sources.met_since(source, when):
                return  # it has connected again since
            if source in self._sources.lost:
                return
            self._sources.lost.add(source)
        if addr is None:
            return
        with self._lock:
            known = self._peers.get((group.index, addr))
            if known is not None and known.ref.born < when:
                known.ref.mark_lost()
            waiting = list(self._expecting.pop(addr, ()))
        log.info("%s: peer lost: %s", self.name, addr)
        for t in waiting:
            self._fail(t, _FE_PEER_LOST)
        if self.on_peer_lost is not None:
            self.on_peer_lost(addr)

    def _fail_over(self, group: _worker.Group, nic: int) -> None:
        """A NIC failed: ask its fabric what was counted, then let the rest go over the others."""
        domain = group.domains[nic]
        log.warning("%s: NIC %s failed; its unfinished writes go over the others", self.name, domain.info.name)
        self._report(errors.NicFailed(f"NIC {domain.info.name} of {group.device} failed"))
        for peer, ctxs in group.outstanding(nic).items():
            try:
                counts = domain.recover(peer, np.array(ctxs, np.uint64), time.monotonic() + self.config.connect_timeout)
            except Exception:
                log.exception("%s: what %s has delivered cannot be told", self.name, domain.info.name)
                counts = [-1] * len(ctxs)
            group.recovered(nic, ctxs, [int(c) for c in counts])
        group.kick()

    # ------------------------------------------------------------------ figures

    def _alive(self) -> None:
        if self.closed:
            raise errors.EngineClosed(f"{self!r}")
        if self._groups_open and self._groups_open[0].forked():
            raise errors.EngineClosed("this process is a forked child of the one that opened the engine; open an engine of its own")

    def stats(self) -> dict[str, Any]:
        """Counters as plain numbers, read without stopping the workers."""
        return {
            "fabric": self.fabric,
            "progress": self.progress,
            "polling": self.polling,
            "regions": len(self._handles),
            "peers": len(self._peers),
            "watchers": len(self._watchers),
            "groups": [g.stats() for g in self._groups_open],
        }


@atexit.register
def _close_all() -> None:
    for engine in list(_engines):
        try:
            engine.close(0.0)
        except Exception:
            log.exception("closing %r at exit", engine)
