"""Settings: arguments, then the environment, then defaults; errors as one tree on the built-ins."""

from __future__ import annotations

import pytest

import fabricx as fx
from fabricx import errors


def test_arguments_come_before_the_environment_and_that_before_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRICX_TIMEOUT", "5")
    monkeypatch.setenv("FABRICX_SPIN", "7")
    monkeypatch.setenv("FABRICX_VM_WRITE", "off")
    monkeypatch.setenv("FABRICX_LIBFABRIC", "/x/libfabric.so")
    c = fx.Config.from_env(timeout=3.0)
    assert (c.timeout, c.spin, c.vm_write, c.ofi_library, c.yields) == (3.0, 7, False, "/x/libfabric.so", fx.Config().yields)


@pytest.mark.parametrize(("name", "value"), [("FABRICX_SPIN", "x"), ("FABRICX_PIN", "maybe"), ("FABRICX_TIMEOUT", "-1"), ("FABRICX_TIMEOUT", "nan")])
def test_bad_values_name_the_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(fx.OutOfRange, match="(?i)" + name.removeprefix("FABRICX_")):
        fx.Config.from_env()


def test_every_error_is_a_fabricx_error_and_a_built_in() -> None:
    wanted = {
        fx.RegistrationError: OSError, fx.UnregisteredLocal: fx.RegistrationError, fx.UnregisteredRemote: fx.RegistrationError,
        fx.PeerLostError: ConnectionError, fx.TransferTimeout: TimeoutError, fx.OutOfRange: ValueError, fx.PageListError: fx.OutOfRange,
        fx.UnknownPeer: LookupError, fx.MaybeDelivered: ConnectionError, fx.NicFailed: ConnectionError, fx.MessageTooLong: ValueError,
        fx.FabricUnavailable: RuntimeError, fx.EngineClosed: RuntimeError, fx.ProtocolError: ConnectionError, fx.ProviderError: OSError,
    }  # fmt: skip
    for cls, base in wanted.items():
        assert issubclass(cls, base) and issubclass(cls, fx.FabricxError)
        assert str(cls("what went wrong")) == "what went wrong"


@pytest.mark.parametrize("status", range(1, 13))
def test_every_status_has_its_own_words(status: int) -> None:
    e = errors.from_status(status, "write of 8 bytes", 104)
    assert str(e).startswith("write of 8 bytes: ") and "104" in str(e)
    texts = {str(errors.from_status(s, "x")) for s in range(1, 13)}
    assert len(texts) == 12
