"""Wire formats survive the trip, and nothing damaged gets through as something else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fabricx as fx
from fabricx.address import parse_hostport

u64 = st.integers(0, (1 << 64) - 1)
text = st.text(max_size=40)
addrs = st.builds(
    fx.NetAddr,
    fabric=text,
    incarnation=u64,
    device=text,
    host=text,
    pid=st.integers(0, (1 << 32) - 1),
    nics=st.lists(st.binary(max_size=512), max_size=16).map(tuple),
    auth=st.binary(max_size=64),
)


@st.composite
def descs(draw: st.DrawFn) -> fx.MrDesc:
    owner = draw(addrs)
    base = draw(u64)
    length = draw(st.integers(0, (1 << 64) - base))
    keys = draw(st.lists(u64, min_size=len(owner.nics), max_size=len(owner.nics)).map(tuple))
    return fx.MrDesc(owner, base, min(length, (1 << 64) - 1), keys, draw(text), draw(text))


@given(addrs)
def test_addresses_survive_bytes_and_text(a: fx.NetAddr) -> None:
    assert fx.NetAddr.from_bytes(a.to_bytes()) == a == fx.NetAddr.parse(a.to_text())
    assert " " not in a.to_text()


@given(descs())
def test_descriptors_survive_bytes(d: fx.MrDesc) -> None:
    e = fx.MrDesc.from_bytes(d.to_bytes())
    assert e == d and (e.device, e.name) == (d.device, d.name)


@given(descs(), st.data())
@settings(max_examples=200)
def test_cut_or_lengthened_bytes_are_refused(d: fx.MrDesc, data: st.DataObject) -> None:
    raw = d.to_bytes()
    with pytest.raises(fx.ProtocolError):
        fx.MrDesc.from_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(fx.ProtocolError, match="too many"):
        fx.MrDesc.from_bytes(raw + b"x")


@given(descs(), st.data())
@settings(max_examples=200)
def test_a_flipped_bit_is_refused_or_makes_another_descriptor(d: fx.MrDesc, data: st.DataObject) -> None:
    raw = bytearray(d.to_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        e = fx.MrDesc.from_bytes(bytes(raw))
    except fx.ProtocolError:
        return
    assert e.to_bytes() == bytes(raw)


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error_and_nothing_else(raw: bytes) -> None:
    for read in (fx.NetAddr.from_bytes, fx.MrDesc.from_bytes):
        with pytest.raises(fx.ProtocolError):
            read(raw)
    with pytest.raises(fx.ProtocolError):
        fx.NetAddr.parse(raw.decode("latin1"))


def test_another_version_is_named() -> None:
    raw = bytearray(fx.NetAddr("local", 1, "cpu:0", "h", 2, (b"x",)).to_bytes())
    raw[4] = 9
    with pytest.raises(fx.ProtocolError, match="version 9; this fabricx speaks version 1"):
        fx.NetAddr.from_bytes(bytes(raw))


def test_ranges_are_checked_when_written() -> None:
    with pytest.raises(fx.OutOfRange, match="incarnation"):
        fx.NetAddr("local", 1 << 64, "", "", 0, ()).to_bytes()
    a = fx.NetAddr("local", 1, "", "", 0, (b"",))
    with pytest.raises(fx.OutOfRange, match="base"):
        fx.MrDesc(a, -1, 1, (0,)).to_bytes()


@pytest.mark.parametrize(
    ("text_", "want"),
    [("::1", ("::1", 0)), ("[::1]", ("::1", 0)), ("[::1]:80", ("::1", 80)), ("fe80::1%eth0", ("fe80::1%eth0", 0)), ("1.2.3.4", ("1.2.3.4", 0)), ("1.2.3.4:5", ("1.2.3.4", 5)), ("host:7", ("host", 7))],
)
def test_ipv6_is_not_taken_for_host_and_port(text_: str, want: tuple[str, int]) -> None:
    assert parse_hostport(text_) == want


@pytest.mark.parametrize("text_", ["[::1", "[::1]x", "h:99999", "h:x"])
def test_bad_ports_are_refused(text_: str) -> None:
    with pytest.raises(fx.OutOfRange):
        parse_hostport(text_)
