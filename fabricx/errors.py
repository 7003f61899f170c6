"""Every error that fabricx raises, in one tree on the built-ins, and the one place where the C status
codes of pyx/fabric.pxd become exceptions."""

from __future__ import annotations


class FabricxError(Exception):
    """Root of all errors of fabricx."""


class RegistrationError(FabricxError, OSError):
    """Memory could not be registered or deregistered, or a source or target is not registered."""


class UnregisteredLocal(RegistrationError):
    """The source is not (or no longer) registered with this engine."""


class UnregisteredRemote(RegistrationError):
    """The target is not (or no longer) registered at the peer."""


class InUse(FabricxError, BlockingIOError):
    """Transfers in flight use what was to be taken away, and the caller did not want to wait."""


class PeerLostError(FabricxError, ConnectionError):
    """The peer died, was removed, restarted (another incarnation) or cut the connection."""


class UnknownPeer(FabricxError, LookupError):
    """The address names no peer that can be reached, or is not one of this group's."""


class TransferTimeout(FabricxError, TimeoutError):
    """A deadline passed. The memory is free only when `Transfer.quiesced()` says so."""


class TransferCancelled(FabricxError):
    """The transfer was cancelled."""


class MaybeDelivered(FabricxError, ConnectionError):
    """A NIC failed and nobody can tell whether the write was counted at the target."""


class NicFailed(FabricxError, ConnectionError):
    """The local NIC failed and there is no other to go over."""


class OutOfRange(FabricxError, ValueError):
    """A range, an index, an immediate or a length is outside what it may be."""


class PageListError(OutOfRange):
    """Source and target page lists do not fit each other, or one of their pages is out of range."""


class MessageTooLong(FabricxError, ValueError):
    """A message is larger than the peer's receive buffers."""


class NotContiguous(FabricxError, ValueError):
    """The array is not contiguous; the message says how to make it so."""


class FabricUnavailable(FabricxError, RuntimeError):
    """A fabric asked for by name is not there; the message says what to install."""


class EngineClosed(FabricxError, RuntimeError):
    """The engine is closed, or this process is a forked child of the one that opened it."""


class ProtocolError(FabricxError, ConnectionError):
    """What came over the wire has another magic, version or length than it should."""


class TooManyEarly(FabricxError, BufferError):
    """A peer sent more early immediates than one peer may."""


class ProviderError(FabricxError, OSError):
    """Anything else a provider reports, with its own words."""


#: FE_ codes of pyx/fabric.pxd
_BY_STATUS: dict[int, type[FabricxError]] = {
    1: PeerLostError,
    2: UnregisteredRemote,
    3: OutOfRange,
    4: UnregisteredLocal,
    5: MessageTooLong,
    6: NicFailed,
    7: MaybeDelivered,
    8: TransferCancelled,
    9: TransferTimeout,
    10: EngineClosed,
    11: ProviderError,
    12: TooManyEarly,
}

_WORDS: dict[int, str] = {
    1: "the peer is lost",
    2: "the target region is not registered at the peer (any more)",
    3: "outside the target region",
    4: "the source is not registered with this NIC",
    5: "the message is longer than the peer's receive buffers",
    6: "the local NIC failed and no other is left",
    7: "a NIC failed; whether the write was delivered cannot be told",
    8: "cancelled",
    9: "the deadline passed",
    10: "the engine was closed",
    11: "the provider failed",
    12: "the peer sent more early immediates than allowed",
}


def from_status(status: int, what: str, vendor: int = 0) -> FabricxError:
    """The exception for an FE_ code; `what` names the operation, its region, range and peer."""
    cls = _BY_STATUS.get(status, ProviderError)
    text = f"{what}: {_WORDS.get(status, f'status {status}')}"
    if vendor:
        text += f" (provider code {vendor})"
    return cls(text)
