"""Names on the wire: NetAddr, one domain group of one engine, and MrDesc, a region that others may write to.

Both have explicit binary layouts with a magic, a version and counted lengths, all checked; nothing from the wire is trusted.
"""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass, field
from typing import Any

from .errors import OutOfRange, ProtocolError

VERSION = 1
MAX_NICS = 16
MAX_NIC_BYTES = 512
MAX_TEXT = 255
_NET_MAGIC = b"fxNA"
_MR_MAGIC = b"fxMR"
_PREFIX = "fabricx:"


class _Reader:
    """Reads counted fields; whatever is missing or left over is a ProtocolError that says where."""

    def __init__(self, data: bytes, what: str) -> None:
        self.data, self.what, self.at = bytes(data), what, 0

    def take(self, n: int, field_: str) -> bytes:
        if len(self.data) - self.at < n:
            raise ProtocolError(f"{self.what} of {len(self.data)} bytes ends within {field_} at byte {self.at}")
        out = self.data[self.at : self.at + n]
        self.at += n
        return out

    def number(self, code: str, field_: str) -> int:
        return int(struct.unpack("<" + code, self.take(struct.calcsize("<" + code), field_))[0])

    def counted(self, code: str, most: int, field_: str) -> bytes:
        n = self.number(code, f"the length of {field_}")
        if n > most:
            raise ProtocolError(f"{self.what}: {field_} has {n} bytes; at most {most} are possible")
        return self.take(n, field_)

    def text(self, field_: str) -> str:
        try:
            return self.counted("B", MAX_TEXT, field_).decode()
        except UnicodeDecodeError:
            raise ProtocolError(f"{self.what}: {field_} is not UTF-8") from None

    def head(self, magic: bytes) -> None:
        got = self.take(4, "the magic")
        if got != magic:
            raise ProtocolError(f"{self.what} starts with {got!r}, not with {magic!r}")
        version = self.number("H", "the version")
        if version != VERSION:
            raise ProtocolError(f"{self.what} has version {version}; this fabricx speaks version {VERSION}")

    def end(self) -> None:
        if self.at != len(self.data):
            raise ProtocolError(f"{self.what} has {len(self.data) - self.at} bytes too many")


def _text(s: str, what: str) -> bytes:
    raw = s.encode()
    if len(raw) > MAX_TEXT:
        raise OutOfRange(f"{what} has {len(raw)} bytes; at most {MAX_TEXT} are possible")
    return bytes([len(raw)]) + raw


@dataclass(frozen=True, slots=True)
class NetAddr:
    """The address of one domain group of one engine.

    Attributes
    ----------
    fabric : name of the fabric.
    incarnation : 64 random bits; a restarted engine has others, and old descriptors are refused.
    device, host, pid : for people and for topology.
    nics : one opaque address a NIC.
    auth : reserved for an authenticator.
    """

    fabric: str
    incarnation: int
    device: str
    host: str
    pid: int
    nics: tuple[bytes, ...]
    auth: bytes = b""

    def to_bytes(self) -> bytes:
        """Wire format."""
        if not 0 <= self.incarnation < 1 << 64:
            raise OutOfRange(f"incarnation is {self.incarnation}; it has 64 bits")
        if not 0 <= self.pid < 1 << 32:
            raise OutOfRange(f"pid is {self.pid}; it has 32 bits")
        if len(self.nics) > MAX_NICS:
            raise OutOfRange(f"{len(self.nics)} NICs; a group has at most {MAX_NICS}")
        out = [_NET_MAGIC, struct.pack("<HQI", VERSION, self.incarnation, self.pid)]
        out += [_text(self.fabric, "fabric"), _text(self.device, "device"), _text(self.host, "host")]
        out.append(bytes([len(self.nics)]))
        for i, nic in enumerate(self.nics):
            if len(nic) > MAX_NIC_BYTES:
                raise OutOfRange(f"the address of NIC {i} has {len(nic)} bytes; at most {MAX_NIC_BYTES} are possible")
            out.append(struct.pack("<H", len(nic)) + nic)
        out.append(struct.pack("<H", len(self.auth)) + self.auth)
        return b"".join(out)

    @classmethod
    def from_bytes(cls, data: bytes) -> NetAddr:
        """Reads the wire format; ProtocolError says what is wrong and where."""
        r = _Reader(data, "a NetAddr")
        out = cls._read(r)
        r.end()
        return out

    @classmethod
    def _read(cls, r: _Reader) -> NetAddr:
        r.head(_NET_MAGIC)
        incarnation, pid = r.number("Q", "the incarnation"), r.number("I", "the pid")
        fabric, device, host = r.text("the fabric"), r.text("the device"), r.text("the host")
        n = r.number("B", "the number of NICs")
        if n > MAX_NICS:
            raise ProtocolError(f"{r.what}: {n} NICs; a group has at most {MAX_NICS}")
        nics = tuple(r.counted("H", MAX_NIC_BYTES, f"the address of NIC {i}") for i in range(n))
        return cls(fabric, incarnation, device, host, pid, nics, r.counted("H", MAX_NIC_BYTES, "the authenticator"))

    def to_text(self) -> str:
        """One line without blanks, for command lines and environment variables; parse() reads it."""
        return _PREFIX + base64.urlsafe_b64encode(self.to_bytes()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> NetAddr:
        """Reads to_text()."""
        if not text.startswith(_PREFIX):
            raise ProtocolError(f"an address starts with {_PREFIX!r}, not with {text[:12]!r}")
        body = text[len(_PREFIX) :].strip()
        try:
            raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        except ValueError:
            raise ProtocolError(f"{text[:40]!r}... is not base64") from None
        return cls.from_bytes(raw)

    def __str__(self) -> str:
        return f"{self.fabric} {self.device} pid {self.pid} @{self.host} [{self.incarnation:016x}]"


@dataclass(slots=True, eq=False)
class MrDesc:
    """A registered region as its owner hands it to whoever may write there.

    Attributes
    ----------
    owner : the group it belongs to.
    base, length : address at the owner, and bytes.
    rkeys : a 64-bit key for each NIC of the owner.
    device : ``"cpu"`` or ``"cuda:N"``.
    name : for error messages.
    """

    owner: NetAddr
    base: int
    length: int
    rkeys: tuple[int, ...]
    device: str = "cpu"
    name: str = ""
    _remote: Any = field(default=None, repr=False)  #: what it is to the engine that used it last

    def to_bytes(self) -> bytes:
        """Wire format."""
        for what, v in (("base", self.base), ("length", self.length), *(("rkey", k) for k in self.rkeys)):
            if not 0 <= v < 1 << 64:
                raise OutOfRange(f"{what} is {v}; it has 64 bits")
        if len(self.rkeys) > MAX_NICS:
            raise OutOfRange(f"{len(self.rkeys)} keys; a group has at most {MAX_NICS} NICs")
        owner = self.owner.to_bytes()
        out = [_MR_MAGIC, struct.pack("<HQQB", VERSION, self.base, self.length, len(self.rkeys))]
        out += [struct.pack("<Q", k) for k in self.rkeys]
        out += [_text(self.device, "device"), _text(self.name, "name"), owner]
        return b"".join(out)

    @classmethod
    def from_bytes(cls, data: bytes) -> MrDesc:
        """Reads the wire format; ProtocolError says what is wrong and where."""
        r = _Reader(data, "an MrDesc")
        r.head(_MR_MAGIC)
        base, length = r.number("Q", "the base"), r.number("Q", "the length")
        n = r.number("B", "the number of keys")
        if n > MAX_NICS:
            raise ProtocolError(f"{r.what}: {n} keys; a group has at most {MAX_NICS} NICs")
        rkeys = tuple(r.number("Q", f"key {i}") for i in range(n))
        device, name = r.text("the device"), r.text("the name")
        owner = NetAddr._read(r)
        r.end()
        if len(owner.nics) != n:
            raise ProtocolError(f"{r.what}: {n} keys for {len(owner.nics)} NICs")
        if base + length > 1 << 64:
            raise ProtocolError(f"{r.what}: {length} bytes at {base:#x} go beyond the address space")
        return cls(owner, base, length, rkeys, device, name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MrDesc):
            return NotImplemented
        return (self.owner, self.base, self.length, self.rkeys) == (other.owner, other.base, other.length, other.rkeys)

    def __hash__(self) -> int:
        return hash((self.owner, self.base, self.rkeys))


def parse_hostport(text: str, default_port: int = 0) -> tuple[str, int]:
    """Splits ``host``, ``host:port``, ``1.2.3.4:5``, ``::1``, ``[::1]`` and ``[::1]:5`` into host and port.

    Raises
    ------
    OutOfRange
        when the port is no number within 0 .. 65535, or a bracket is missing.
    """
    host, port = text, ""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise OutOfRange(f"{text!r}: want [address]:port")
        port = rest[1:]
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not port:
        return host, default_port
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise OutOfRange(f"{text!r}: the port must be within 0 .. 65535")
    return host, int(port)
