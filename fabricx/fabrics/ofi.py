"""The ofi fabric, control path: finds a libfabric, opens domains, shakes hands. The hot path is pyx/ofi.pyx.

The provider is efa where there is hardware, else tcp (called net in libfabric 1.17). Libraries are looked for in the order
of `places()`; the first that opens and is new enough wins.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import secrets
import struct
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import errors
from ..address import NetAddr, parse_hostport
from ..config import Config
from .base import CAP_DEVICE, CAP_LANDED, Domain, DomainInfo, Fabric, GroupSpec, LocalKey, Memory, RemoteKey

try:
    from .. import _ofi
except ImportError as _e:  # pragma: no cover - depends on the build
    raise ImportError(f"fabricx was built without libfabric's headers (Debian: libfabric-dev): {_e}") from None

log = logging.getLogger("fabricx")

SYMBOLS = ("fi_getinfo", "fi_freeinfo", "fi_dupinfo", "fi_fabric", "fi_version", "fi_strerror", "fi_tostr")
OLDEST = (1, 17)
DMABUF = (1, 20)  # registration by dma-buf came with this
NATIVE_TCP = (1, 18)  # from here on provider "tcp" has native RDM endpoints; in 1.17 the same code is called "net"
_SLOT_BITS = 16
_N_REGIONS = 1 << _SLOT_BITS
_HELLO_FIRST, _HELLO_MOST = 0.05, 1.0  # seconds between hellos: first, and after back-off
_DEPTH = 4096  # more than one peer can have outstanding, so that a stopped one leaves room for others
_TELL_AGAIN = 0.2  # seconds after which importers that have not let go of a region are told again
_AUTHENTICATOR = 256  # bytes that a hello may carry in the field kept for one


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


class OfiDomain(Domain):
    """One libfabric domain with its endpoint."""

    def __init__(
        self, fabric: OfiFabric, spec: GroupSpec, lib: Library, provider: str, node: str, domain: str, index: int
    ) -> None:
        self.fabric, self.spec, self.lib, self.index = fabric, spec, lib, index
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
        self.regions: dict[int, tuple[int, Memory]] = {}  # rkey -> (mr, memory)
        self.free_slots: list[int] = []
        self.next_slot = 0
        self.next_key = 16
        self.slots = threading.Lock()
        self.asking = threading.Lock()
        self.names: dict[int, str] = {}
        self.closed = False

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
        with self.slots:
            if self.free_slots:
                slot = self.free_slots.pop()
            elif self.next_slot < _N_REGIONS:
                slot = self.next_slot
                self.next_slot += 1
            else:
                raise errors.RegistrationError(28, f"all {_N_REGIONS} registrations of {self.info.name} are in use")
            self.next_key += 1
            key = self.next_key if self.key_size < 8 else secrets.randbits(62) | 1 << 62
        rkey = (secrets.randbits(47) | 1 << 47) << _SLOT_BITS | slot
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
        except OSError as e:
            with self.slots:
                self.free_slots.append(slot)
            raise errors.RegistrationError(e.errno, f"{self.info.name}: {e.strerror}") from None
        self.regions[rkey] = (mr, memory)
        return LocalKey(desc, rkey, memory)

    def dereg(self, key: LocalKey, deadline: float) -> None:
        if key.rkey not in self.regions:
            return
        pause, again = 0.0001, 0.0
        while True:
            now = time.monotonic()
            self._open(f"{key.token.length} bytes at {key.token.addr:#x}")
            with self.spec.lock():
                waiting = self.state.gone(key.rkey, now >= again > 0)
                if waiting and now > deadline:
                    self.state.keep_region(key.rkey)
            if not waiting:
                break
            if now > deadline:
                raise errors.TransferTimeout(
                    f"{key.token.length} bytes at {key.token.addr:#x}: {waiting} peers have not let go; "
                    "the memory must not be reused"
                )
            if now >= again:
                again = now + _TELL_AGAIN
            self.spec.kick()
            time.sleep(pause)
            pause = min(pause * 2, 0.005)
        with self.spec.lock():
            entry = self.regions.pop(key.rkey, None)
            if entry is None:  # closed with its domain
                return
            mr, memory = entry
            rc = self.state.drop_region(key.rkey, mr)
        if rc:
            raise errors.RegistrationError(
                -rc, f"{self.info.name}: {memory.length} bytes at {memory.addr:#x}: {self.lib.api.strerror(rc)}"
            )
        with self.slots:
            self.free_slots.append(key.rkey & (_N_REGIONS - 1))

    def _open(self, what: object) -> None:
        """Ends what waits while another thread closes the domain."""
        if self.closed:
            raise errors.EngineClosed(f"{what}: {self.info.name} was closed meanwhile")

    # -- peers

    def connect(self, addr: bytes, netaddr: bytes, deadline: float) -> int:
        who = NetAddr.from_bytes(netaddr)
        src = self.spec.source_of(netaddr)
        try:
            with self.spec.lock():
                index = self.state.peer(addr, who.incarnation, src)
        except OSError as e:
            raise errors.UnknownPeer(f"{who}: {e.strerror}") from None
        if index is None:
            raise errors.ProviderError(28, f"{self.info.name} has no room for another peer")
        self.names[index] = str(who)
        mine = self.spec.address()
        body = _join(self.addr, mine)
        wait, again = _HELLO_FIRST, 0.0
        while True:
            self._open(who)
            state, reason = self.state.state(index)
            if state == "up":
                return index
            if state == "lost":
                raise errors.PeerLostError(f"{who} is lost")
            if state == "refused":
                with self.spec.lock():
                    self.state.reset(index)
                why = _ofi.REFUSALS.get(reason, "?")
                if why == "version":
                    raise errors.ProtocolError(f"{who} speaks another version of the ofi fabric")
                raise errors.PeerLostError(
                    f"{who} refused: {'this incarnation is over' if why == 'incarnation' else why}"
                )
            now = time.monotonic()
            if now > deadline:
                with self.spec.lock():
                    self.state.give_up(index)
                raise errors.TransferTimeout(f"{who} did not answer within the time-out")
            if now >= again:
                with self.spec.lock():
                    self.state.hello(index, body)
                again = now + wait
                wait = min(wait * 2, _HELLO_MOST)
            self.spec.kick()
            time.sleep(0.0005)

    def disconnect(self, peer: int) -> None:
        with self.spec.lock():
            self.state.forget(peer)
        self.spec.kick()

    def import_mr(self, peer: int, rkey: int, base: int, length: int, deadline: float) -> RemoteKey:
        what = f"region of {length} bytes at {base:#x} at {self.names.get(peer, f'peer {peer}')}"
        if not self.asking.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise errors.TransferTimeout(f"{what}: another import takes too long")
        try:
            again, wait = 0.0, 0.2
            answer = None
            number = secrets.randbits(60)
            while answer is None:
                self._open(what)
                if self.state.state(peer)[0] != "up":
                    raise errors.PeerLostError(f"{what}: the peer is lost")
                now = time.monotonic()
                if now > deadline:
                    raise errors.TransferTimeout(f"{what}: no answer")
                if now >= again:
                    with self.spec.lock():
                        self.state.ask_import(peer, number, rkey, base, length)
                    again, wait = now + wait, min(wait * 2, 1.0)
                self.spec.kick()
                time.sleep(0.0002)
                answer = self.state.reply()
            status, key, addr = answer
            if status:
                raise errors.from_status(status, what)
            with self.spec.lock():
                index = self.state.add_import(peer, rkey, key, addr, length)
        finally:
            self.asking.release()
        if index is None:
            raise errors.ProviderError(28, f"{self.info.name} has imported as many regions as it can")
        return RemoteKey(0, index)

    def release_mr(self, peer: int, key: RemoteKey) -> None:
        with self.spec.lock():
            self.state.drop_import(key.key)

    def recover(self, peer: int, ctxs: np.ndarray, deadline: float) -> np.ndarray:
        """What a failed endpoint has delivered cannot be told: libfabric says nothing of it."""
        return np.full(len(ctxs), -1, np.int64)

    def peers(self) -> list[dict[str, Any]]:
        with self.spec.lock():
            rows = self.state.peers()
        for r in rows:
            r["addr"] = self.names.get(r["index"], "?")
        return rows

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.fabric.forget(self)
        with self.spec.lock():
            self.state.closing()
            for p in self.state.peers():
                self.state.bye(p["index"])
        end = time.monotonic() + 0.3
        driver = _Pump(self)
        while self.state.unsent() and time.monotonic() < end:
            driver.turn()
        with self.spec.lock():
            for mr, _ in self.regions.values():
                _ofi.close_mr(mr)
            self.regions.clear()
            self.state.shut()

    # -- hellos of others, on the fabric's thread

    def answer_hellos(self) -> None:
        """Answers what was heard; the same hello twice gets the same answer."""
        while True:
            with self.spec.lock():
                h = self.state.next_hello()
            if h is None:
                return
            theirs, session, target, version, body = h
            try:
                addr, netaddr = _split(body)
                who = NetAddr.from_bytes(netaddr)
            except (errors.ProtocolError, struct.error):
                log.warning("%s: a hello that makes no sense", self.info.name)
                continue
            if who.incarnation != session:
                log.warning("%s: a hello whose address has another incarnation", self.info.name)
                continue
            src = self.spec.source_of(netaddr)
            try:
                with self.spec.lock():
                    index = self.state.peer(addr, session, src)
                    if index is not None:
                        self.names[index] = str(who)
                        if version != 1:
                            self.state.refuse(index, theirs, 2)
                        elif target != self.spec.incarnation:
                            self.state.refuse(index, theirs, 1)
                        else:
                            self.state.welcome(index, theirs, src)
            except OSError as e:
                log.warning("%s: hello of %s: %s", self.info.name, who, e)
            self.spec.kick()


def _join(addr: bytes, netaddr: bytes) -> bytes:
    """The body of a hello: the NIC's address, the group's, and a field kept for an authenticator. This layout is the same
    in all versions, so that a refusal finds its way."""
    return struct.pack("<H", len(addr)) + addr + struct.pack("<I", len(netaddr)) + netaddr + struct.pack("<H", 0)


def _split(body: bytes) -> tuple[bytes, bytes]:
    (n,) = struct.unpack_from("<H", body)
    addr = body[2 : 2 + n]
    (m,) = struct.unpack_from("<I", body, 2 + n)
    netaddr = body[6 + n : 6 + n + m]
    (k,) = struct.unpack_from("<H", body, 6 + n + m)
    if len(addr) != n or len(netaddr) != m or k > _AUTHENTICATOR or len(body) != 8 + n + m + k:
        raise errors.ProtocolError("a hello of the wrong length")
    return addr, netaddr


class _Pump:
    """Polls a domain whose worker has stopped, so that the last messages get out."""

    def __init__(self, domain: OfiDomain) -> None:
        self.domain = domain

    def turn(self) -> None:
        with self.domain.spec.lock():
            _ofi.poll_once(self.domain.dom)
        time.sleep(0.0005)


class OfiFabric(Fabric):
    """libfabric: efa on AWS, tcp anywhere."""

    name = "ofi"

    def __init__(self) -> None:
        self.hello_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        os.set_blocking(self.hello_fd, True)
        self.domains: list[OfiDomain] = []
        self.lock = threading.Lock()
        self.stop = False
        self.pid = os.getpid()
        self.thread = threading.Thread(target=self._run, name="fabricx ofi", daemon=True)
        self.thread.start()

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
        with self.lock:
            self.domains += domains
        return list(domains)

    def forget(self, domain: OfiDomain) -> None:
        with self.lock:
            if domain in self.domains:
                self.domains.remove(domain)

    def _run(self) -> None:
        while True:
            try:
                os.eventfd_read(self.hello_fd)
            except OSError:
                return
            if self.stop:
                return
            with self.lock:
                domains = list(self.domains)
            for d in domains:
                try:
                    d.answer_hellos()
                except Exception:
                    log.exception("%s: answering a hello", d.info.name)

    def close(self) -> None:
        if self.stop or os.getpid() != self.pid:
            return
        self.stop = True
        os.eventfd_write(self.hello_fd, 1)
        if threading.current_thread() is not self.thread:
            self.thread.join(10)
        os.close(self.hello_fd)
