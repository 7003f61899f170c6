"""fabricx: point-to-point transfers for LLM systems over any reliable, unordered fabric.

Names are loaded on first use, so that `import fabricx` needs nothing but the standard library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "TransferEngine": "engine",
    "Transfer": "_worker",
    "MrHandle": "_worker",
    "NativeCallback": "_worker",
    "Counter": "_worker",
    "PeerGroup": "engine",
    "PreparedPages": "_worker",
    "RecvPool": "engine",
    "UvmWatcher": "engine",
    "Pages": "memory",
    "ScatterDst": "memory",
    "HostBuffer": "memory",
    "NetAddr": "address",
    "MrDesc": "address",
    "Config": "config",
    "Chaos": "fabrics.local",
} | dict.fromkeys(
    (
        "FabricxError", "RegistrationError", "InUse", "UnregisteredLocal", "UnregisteredRemote", "PeerLostError",
        "UnknownPeer", "TransferTimeout", "TransferCancelled", "MaybeDelivered", "NicFailed", "OutOfRange",
        "PageListError", "MessageTooLong", "NotContiguous", "FabricUnavailable", "EngineClosed",
        "ProtocolError", "TooManyEarly", "ProviderError",
    ),
    "errors",
)  # fmt: skip

__all__ = [*_HOME, "__version__"]

if TYPE_CHECKING:
    from .engine import PeerGroup, RecvPool, TransferEngine, UvmWatcher  # noqa: F401
    from .errors import *  # noqa: F403
    from .memory import HostBuffer, Pages, ScatterDst  # noqa: F401


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'fabricx' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
