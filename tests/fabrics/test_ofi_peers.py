"""The ofi fabric among peers that misbehave: strangers that say anything, addresses that take nothing, processes that
stop in the middle. What is asserted is that they harm nobody else, and that every wait has its end."""

from __future__ import annotations

import base64
import dataclasses
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue

import numpy as np
import pytest
from engines import ofi_reason, until
from peer import Peer

import fabricx as fx

pytestmark = pytest.mark.skipif(bool(ofi_reason()), reason=ofi_reason() or "-")
FAST = fx.Config.from_env(timeout=20.0, connect_timeout=5.0)
HEAD = struct.Struct("<IHHQQIIQQQII")  # of a control message: pyx/ofi.pyx, head_t
MAGIC, VERSION = 0x66784F46, 1
HELLO, WELCOME, REFUSED, IMPORT, IMPORTED, GONE, GONE_ACK, RTS, CTS, FRAG, BYE = 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12
UNRTS, UNRTS_ACK, FENCE, FENCED = 13, 14, 15, 16
KEY, RANGE = 2, 3  # FE_REMOTE_KEY, FE_REMOTE_RANGE


@dataclasses.dataclass
class Message:
    """A control message, with defaults that are right."""

    type: int
    session: int
    target: int
    to: int = 0
    sender: int = 0
    a: int = 0
    b: int = 0
    c: int = 0
    body: bytes = b""
    magic: int = MAGIC
    version: int = VERSION
    length: int = -1

    def to_bytes(self) -> bytes:
        n = len(self.body) if self.length < 0 else self.length
        return HEAD.pack(self.magic, self.version, self.type, self.session, self.target, self.to, self.sender, self.a, self.b, self.c,
                         n, 0) + self.body  # fmt: skip

    @classmethod
    def from_bytes(cls, raw: bytes) -> Message:
        magic, version, kind, session, target, to, sender, a, b, c, n, _ = HEAD.unpack_from(raw)
        assert magic == MAGIC and n == len(raw) - HEAD.size
        return cls(kind, session, target, to, sender, a, b, c, raw[HEAD.size :], version=version)


class Speaker:
    """A bare endpoint in a process of its own that says whatever it is told to (ofi_speaker.c)."""

    def __init__(self, program: str) -> None:
        from fabricx.fabrics import ofi

        config = fx.Config.from_env()
        library = ofi.library(config)
        provider, _ = ofi.choose_provider(library, config)
        self.process = subprocess.Popen([program, library.path, provider, "127.0.0.1"], stdin=-1, stdout=-1, text=True)
        self.incarnation = secrets.randbits(64)
        self.said: Queue[str] = Queue()
        self.got: Queue[Message] = Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        word, _, address = self.said.get(timeout=10).partition(" ")
        assert word == "ready"
        self.address = bytes.fromhex(address)

    def _read(self) -> None:
        for line in self.process.stdout:  # type: ignore[union-attr]
            word, _, rest = line.strip().partition(" ")
            if not line.endswith("\n"):
                return  # killed in the middle of a line
            if word == "got":
                self.got.put(Message.from_bytes(bytes.fromhex(rest)))
            else:
                self.said.put(line.strip())

    def say(self, nic: bytes, what: Message | bytes) -> None:
        raw = what if isinstance(what, bytes) else what.to_bytes()
        self.process.stdin.write(f"send {nic.hex()} {raw.hex()}\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        assert self.said.get(timeout=10) == "sent"

    def hear(self, kind: int, seconds: float = 5.0) -> Message:
        """The next message of a kind."""
        end = time.monotonic() + seconds
        while True:
            m = self.got.get(timeout=max(0.01, end - time.monotonic()))
            if m.type == kind:
                return m

    def hears_nothing(self, seconds: float) -> bool:
        try:
            self.got.get(timeout=seconds)
        except Empty:
            return True
        return False

    def name(self) -> fx.NetAddr:
        return fx.NetAddr("ofi", self.incarnation, "cpu:0", "nowhere", self.process.pid, (self.address,))

    def hello(self, target: int, **k: object) -> Message:
        them = self.name().to_bytes()
        body = (
            struct.pack("<H", len(self.address))
            + self.address
            + struct.pack("<I", len(them))
            + them
            + struct.pack("<HH", 0, 0)
        )
        return Message(HELLO, self.incarnation, target, sender=7, body=body, **k)  # type: ignore[arg-type]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.reader.join(10)
        for f in (self.process.stdin, self.process.stdout):
            f.close()  # type: ignore[union-attr]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler for the bare endpoint")
    out = str(tmp_path_factory.mktemp("speaker") / "ofi_speaker")
    subprocess.run(["cc", "-O1", "-w", "-o", out, str(Path(__file__).with_name("ofi_speaker.c")), "-ldl"], check=True)
    return out


@pytest.fixture
def speaker(program: str) -> Iterator[Speaker]:
    s = Speaker(program)
    yield s
    s.close()


@pytest.fixture
def engine() -> Iterator[fx.TransferEngine]:
    with fx.TransferEngine("ofi", config=FAST) as e:
        yield e


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    all_: list[Peer] = []
    yield all_
    for p in all_:
        if p.process.poll() is None:
            os.kill(p.pid, signal.SIGCONT)
        p.kill()


def desc(p: Peer) -> fx.MrDesc:
    return fx.MrDesc.from_bytes(base64.b64decode(p.desc))


def b64(x: fx.NetAddr | fx.MrDesc) -> str:
    return base64.b64encode(x.to_bytes()).decode()


def counts(e: fx.TransferEngine) -> dict[str, int]:
    d = e.groups[0].domains[0]
    with d.spec.lock():
        return d.state.counts()  # type: ignore[no-any-return]


def stop(p: Peer | Speaker) -> None:
    """Stops a process; when this returns, none of its threads runs any more."""
    os.kill(p.process.pid, signal.SIGSTOP)
    tasks = list(Path(f"/proc/{p.process.pid}/task").iterdir())
    until(lambda: all((t / "stat").read_text().rpartition(")")[2].split()[0] == "T" for t in tasks))


def still_serves(e: fx.TransferEngine, peers: list[Peer]) -> None:
    """A new peer connects, writes there, and is counted, well within its deadlines."""
    p = Peer("ofi")
    peers.append(p)
    memory = e.alloc(4096)
    handle, mine = e.reg_mr(memory)
    number = e.alloc_imm()
    arrived = e.expect_imm_count(number, 1)
    p.call(do="fill", n=64, value=9)
    p.call(do="write", n=64, imm=number, desc=b64(mine))
    arrived.wait(5)
    assert (memory.array[:64] == 9).all()
    e.free_imm(number)
    e.dereg_mr(handle, timeout=5)


# ---------------------------------------------------------------- strangers


def test_garbage_is_dropped_and_counted(engine: fx.TransferEngine, speaker: Speaker, peers: list[Peer]) -> None:
    here = engine.address
    nic = here.nics[0]
    fine = {"session": speaker.incarnation, "target": here.incarnation}
    bad = [
        b"x",
        os.urandom(63),
        os.urandom(4096),
        Message(RTS, **fine, magic=MAGIC + 1).to_bytes(),
        Message(RTS, **fine, length=1).to_bytes(),  # longer than what came
        Message(RTS, **fine, length=0xFFFFFFFF).to_bytes(),
        Message(RTS, **fine, to=0xFFFFFFFF).to_bytes(),  # no such peer
        Message(IMPORT, **fine, to=0, version=2).to_bytes(),
        Message(99, **fine).to_bytes(),
    ]
    for raw in bad:
        speaker.say(nic, raw)
    until(lambda: counts(engine)["garbage"] == len(bad))
    broken = speaker.hello(here.incarnation)
    for body in (
        b"",
        b"\xff\xff",
        broken.body[:-1],
        broken.body + b"x",
        os.urandom(200),
        broken.body.replace(b"fxNA", b"fxNB"),
    ):
        speaker.say(nic, dataclasses.replace(broken, body=body))
    speaker.say(nic, dataclasses.replace(broken, session=speaker.incarnation ^ 1))  # not that of its NetAddr
    assert speaker.hears_nothing(0.3)
    assert not engine.groups[0].domains[0].peers()
    still_serves(engine, peers)


def test_the_same_hello_gets_the_same_answer(engine: fx.TransferEngine, speaker: Speaker) -> None:
    here = engine.address
    answers = []
    for _ in range(3):
        speaker.say(here.nics[0], speaker.hello(here.incarnation))
        answers.append(speaker.hear(WELCOME))
    assert len({(m.sender, m.a, m.session, m.to) for m in answers}) == 1
    assert answers[0].to == 7 and answers[0].session == here.incarnation
    assert len(engine.groups[0].domains[0].peers()) == 1


def test_hellos_for_another_incarnation_or_version_are_refused(engine: fx.TransferEngine, speaker: Speaker) -> None:
    here = engine.address
    for k in range(3):
        speaker.say(here.nics[0], speaker.hello(here.incarnation ^ (k + 1)))
        assert speaker.hear(REFUSED).a == 1
    speaker.say(here.nics[0], speaker.hello(here.incarnation, version=9))
    m = speaker.hear(REFUSED)
    assert m.a == 2 and m.version == VERSION
    assert not engine.groups[0].domains[0].peers()  # who was only ever refused takes no place


def test_a_hello_may_carry_an_authenticator(engine: fx.TransferEngine, speaker: Speaker) -> None:
    """The field is kept for one to come; whoever sends it is understood."""
    here = engine.address
    h = speaker.hello(here.incarnation)
    speaker.say(here.nics[0], dataclasses.replace(h, body=h.body[:-2] + struct.pack("<H", 32) + bytes(32)))
    speaker.hear(WELCOME)
    speaker.say(here.nics[0], dataclasses.replace(h, body=h.body[:-2] + struct.pack("<H", 300) + bytes(300)))
    assert speaker.hears_nothing(0.3)


def connect_to(
    engine: fx.TransferEngine, speaker: Speaker, answer: Message | None, timeout: float = 5.0
) -> BaseException | None:
    """Connects to the speaker, which answers the first hello; what was raised."""
    box: list[BaseException | None] = []

    def go() -> None:
        try:
            engine.connect(speaker.name(), timeout=timeout)
            box.append(None)
        except fx.FabricxError as e:
            box.append(e)

    t = threading.Thread(target=go)
    t.start()
    h = speaker.hear(HELLO)
    if answer is not None:
        speaker.say(engine.address.nics[0], dataclasses.replace(answer, to=h.sender))
    t.join(timeout + 5)
    assert box, "connect has no end"
    return box[0]


def test_a_peer_of_another_version_is_named(engine: fx.TransferEngine, speaker: Speaker) -> None:
    no = Message(REFUSED, 0, engine.address.incarnation, a=2, version=3)
    e = connect_to(engine, speaker, no)
    assert isinstance(e, fx.ProtocolError) and "version" in str(e) and str(speaker.process.pid) in str(e)


def test_a_peer_that_never_answers_ends_at_the_deadline(engine: fx.TransferEngine, speaker: Speaker) -> None:
    start = time.monotonic()
    e = connect_to(engine, speaker, None, timeout=0.7)
    assert isinstance(e, fx.TransferTimeout) and str(speaker.process.pid) in str(e)
    assert 0.6 < time.monotonic() - start < 5
    hellos = 1
    while not speaker.hears_nothing(0.1):
        hellos += 1
    assert 2 <= hellos <= 8  # again and again, with back-off


def test_a_refused_peer_can_be_asked_again(engine: fx.TransferEngine, speaker: Speaker) -> None:
    e = connect_to(engine, speaker, Message(REFUSED, 0, engine.address.incarnation, a=1))
    assert isinstance(e, fx.PeerLostError) and "incarnation is over" in str(e)
    yes = Message(WELCOME, speaker.incarnation, engine.address.incarnation, sender=3, a=5)
    assert connect_to(engine, speaker, yes) is None


def test_imports_are_checked_at_the_owner(engine: fx.TransferEngine, speaker: Speaker) -> None:
    memory = engine.alloc(4096)
    _, mine = engine.reg_mr(memory)
    here, nic = engine.address, engine.address.nics[0]
    speaker.say(nic, speaker.hello(here.incarnation))
    to = speaker.hear(WELCOME).sender

    def ask(rkey: int, base: int, length: bytes) -> Message:
        speaker.say(
            nic, Message(IMPORT, speaker.incarnation, here.incarnation, to, 7, a=1, b=rkey, c=base, body=length)
        )
        return speaker.hear(IMPORTED)

    size = struct.pack("<Q", mine.length)
    good = ask(mine.rkeys[0], mine.base, size)
    assert good.b == 0
    assert ask(mine.rkeys[0] ^ 1 << 40, mine.base, size).b == KEY
    assert ask((1 << 64) - 1, mine.base, size).b == KEY
    assert ask(mine.rkeys[0], mine.base + 1, size).b == RANGE
    assert ask(mine.rkeys[0], mine.base, struct.pack("<Q", mine.length + 1)).b == RANGE
    assert ask(mine.rkeys[0], mine.base, b"").b == RANGE


def test_a_region_goes_when_its_importers_have_let_go(engine: fx.TransferEngine, speaker: Speaker) -> None:
    """Asked twice it is one importer; told again while it does not answer; the owner's wait has an end."""
    memory = engine.alloc(4096)
    handle, mine = engine.reg_mr(memory)
    here, nic = engine.address, engine.address.nics[0]
    fine = {"session": speaker.incarnation, "target": here.incarnation, "sender": 7}
    speaker.say(nic, speaker.hello(here.incarnation))
    to = speaker.hear(WELCOME).sender
    ask = Message(IMPORT, **fine, to=to, a=1, b=mine.rkeys[0], c=mine.base, body=struct.pack("<Q", mine.length))
    for _ in range(3):
        speaker.say(nic, ask)
        assert speaker.hear(IMPORTED).b == 0
    with pytest.raises(fx.TransferTimeout, match="1 peers have not let go"):
        engine.dereg_mr(handle, timeout=0.5)
    told = 0
    while True:
        try:
            assert speaker.hear(GONE, 0.3).b == mine.rkeys[0]
        except Empty:
            break
        told += 1
    assert told >= 2
    speaker.say(nic, Message(GONE_ACK, **fine, to=to, b=mine.rkeys[0]))  # of no effect: nobody waits for it now
    speaker.say(nic, ask)  # answered after that was read
    assert speaker.hear(IMPORTED).b == 0
    box: list[BaseException | None] = []

    def dereg() -> None:
        try:
            engine.dereg_mr(handle, timeout=10)
            box.append(None)
        except fx.FabricxError as e:
            box.append(e)

    t = threading.Thread(target=dereg)
    t.start()
    assert speaker.hear(GONE).b == mine.rkeys[0]
    speaker.say(nic, ask)
    assert speaker.hear(IMPORTED).b == KEY  # a region that goes is given to nobody any more
    assert not box
    speaker.say(nic, Message(GONE_ACK, **fine, to=to, b=mine.rkeys[0]))
    t.join(10)
    assert box == [None]


def test_a_lost_importer_has_let_go(engine: fx.TransferEngine, speaker: Speaker, peers: list[Peer]) -> None:
    memory = engine.alloc(4096)
    handle, mine = engine.reg_mr(memory)
    here, nic = engine.address, engine.address.nics[0]
    speaker.say(nic, speaker.hello(here.incarnation))
    to = speaker.hear(WELCOME).sender
    speaker.say(nic, Message(IMPORT, speaker.incarnation, here.incarnation, to, 7, a=1, b=mine.rkeys[0], c=mine.base,
                             body=struct.pack("<Q", mine.length)))  # fmt: skip
    speaker.hear(IMPORTED)
    speaker.say(nic, Message(BYE, speaker.incarnation, here.incarnation, to, 7))
    until(lambda: not engine.groups[0].domains[0].peers()[0]["alive"])
    engine.dereg_mr(handle, timeout=2)
    still_serves(engine, peers)


# ---------------------------------------------------------------- addresses that take nothing


def test_addresses_that_take_nothing_hold_up_nobody_else(engine: fx.TransferEngine, peers: list[Peer]) -> None:
    """A listening socket whose owner never answers: the provider is busy with it for ever."""
    here = engine.address
    holes = [socket.create_server(("127.0.0.1", 0)) for _ in range(12)]
    ends: list[BaseException] = []

    def go(k: int) -> None:
        port = struct.pack(">H", holes[k].getsockname()[1])
        nic = here.nics[0][:2] + port + here.nics[0][4:]
        nowhere = fx.NetAddr("ofi", 1000 + k, "cpu:0", "nowhere", 1, (nic,))
        try:
            engine.connect(nowhere, timeout=5.0)
        except fx.FabricxError as e:
            ends.append(e)

    threads = [threading.Thread(target=go, args=(k,)) for k in range(len(holes))]
    try:
        for t in threads:
            t.start()
        until(lambda: counts(engine)["queued"] == len(holes))
        still_serves(engine, peers)
        fresh = Peer("ofi")  # the first hello to it finds no connection either, and waits in the same queue
        peers.append(fresh)
        h, _ = engine.reg_mr(bytearray(b"x" * 64))
        engine.submit_single_write(64, 1, (h, 0), (desc(fresh), 0)).wait(3)
        assert not ends, "the others should still be waiting: this test shows nothing otherwise"
        for t in threads:
            t.join(10)
        assert [type(e) for e in ends] == [fx.TransferTimeout] * len(holes)
        until(lambda: counts(engine)["queued"] == counts(engine)["slots"] == 0)  # nothing is kept for them
    finally:
        for s in holes:
            s.close()


def test_closing_ends_what_waits_for_a_peer() -> None:
    engine = fx.TransferEngine("ofi", config=FAST)
    ends: list[BaseException] = []
    with socket.create_server(("127.0.0.1", 0)) as hole:
        here = engine.address.nics[0]
        nic = here[:2] + struct.pack(">H", hole.getsockname()[1]) + here[4:]

        def go() -> None:
            try:
                engine.connect(fx.NetAddr("ofi", 1, "cpu:0", "nowhere", 1, (nic,)), timeout=30.0)
            except fx.FabricxError as e:
                ends.append(e)

        t = threading.Thread(target=go)
        t.start()
        until(lambda: counts(engine)["queued"] == 1)
        engine.close()
        t.join(10)
    assert [type(e) for e in ends] == [fx.EngineClosed]


# ---------------------------------------------------------------- processes that stop


def test_a_stopped_peer_takes_no_share_of_others(engine: fx.TransferEngine, peers: list[Peer]) -> None:
    stopped, other = Peer("ofi", size=1 << 20), Peer("ofi", size=1 << 20)
    peers += [stopped, other]
    h, _ = engine.reg_mr(engine.alloc(1 << 20))
    d, o = desc(stopped), desc(other)
    for x in (d, o):
        engine.submit_single_write(8, None, (h, 0), (x, 0)).wait()
    stop(stopped)
    large = [engine.submit_single_write(1 << 16, 1, (h, 0), (d, 0), timeout=60) for _ in range(1500)]
    small = [engine.submit_single_write(8, 2, (h, 0), (d, 0), timeout=60) for _ in range(1500)]
    pages = fx.Pages(stride=64, count=4000)
    paged = engine.submit_paged_writes(64, 3, (h, pages), (d, pages), timeout=60)
    for _ in range(50):
        engine.submit_single_write(1 << 16, 1, (h, 0), (o, 0)).wait(5)
        engine.submit_single_write(8, 2, (h, 0), (o, 0)).wait(5)
    assert not large[-1].done() and not paged.done(), "it should be held up: this test shows nothing otherwise"
    assert counts(engine)["writes"] <= 512
    os.kill(stopped.pid, signal.SIGCONT)
    for t in (*large, *small, paged):
        t.wait(30)
    until(lambda: [stopped.call(do="count", imm=i) for i in (1, 2, 3)] == [1500, 1500, 4000])
    assert [other.call(do="count", imm=i) for i in (1, 2)] == [50, 50]


def test_memory_that_is_taken_back_stays_as_it_was(engine: fx.TransferEngine, peers: list[Peer]) -> None:
    """A peer writes without end; from the return of dereg_mr on no byte changes, and the writer is told why."""
    w = Peer("ofi", size=1 << 20)
    peers.append(w)
    memory = engine.alloc(1 << 20)
    handle, mine = engine.reg_mr(memory)
    w.call(do="fill", n=1 << 20, value=1)
    w.call(do="write", n=8, desc=b64(mine))
    w.send(do="writes", count=100_000, n=1 << 19, imm=2, desc=b64(mine))
    until(lambda: engine.imm_count(2) > 5)
    engine.dereg_mr(handle, timeout=10)
    memory.array[:] = 0
    with pytest.raises(RuntimeError, match="UnregisteredRemote"):
        w.answer(20)
    time.sleep(0.05)
    assert not np.any(memory.array)
    w.send(do="write", n=8, desc=b64(mine))
    with pytest.raises(RuntimeError, match="UnregisteredRemote"):
        w.answer(20)


def test_a_stopped_importer_keeps_memory_until_it_goes_on(engine: fx.TransferEngine, peers: list[Peer]) -> None:
    w = Peer("ofi", size=1 << 20)
    peers.append(w)
    memory = engine.alloc(1 << 20)
    handle, mine = engine.reg_mr(memory)
    w.call(do="write", n=8, desc=b64(mine))
    stop(w)
    with pytest.raises(fx.TransferTimeout, match="must not be reused|have not let go"):
        engine.dereg_mr(handle, timeout=0.4)
    os.kill(w.pid, signal.SIGCONT)
    engine.dereg_mr(handle, timeout=10)


def test_messages_to_a_stopped_peer_wait_and_keep_their_order(engine: fx.TransferEngine, peers: list[Peer]) -> None:
    p, other = Peer("ofi"), Peer("ofi")
    peers += [p, other]
    for x in peers:
        x.call(do="recvs", n=300_000, count=4)
        engine.connect(desc(x).owner)
    stop(p)
    long = [engine.submit_send(desc(p).owner, f"{k:04}".encode() * 60_000, timeout=60) for k in range(8)]
    engine.submit_send(desc(other).owner, b"to the other").wait(5)
    until(lambda: other.call(do="messages") == ["to the other"])
    assert not long[0].done()
    os.kill(p.pid, signal.SIGCONT)
    for t in long:
        t.wait(20)
    until(lambda: len(p.call(do="messages")) == 8)
    assert [m[:4] for m in p.call(do="messages")] == [f"{k:04}" for k in range(8)]


def test_a_message_that_is_stuck_half_way_leaves_room_for_others(
    engine: fx.TransferEngine, speaker: Speaker, peers: list[Peer]
) -> None:
    """The speaker grants a message longer than what sockets hold, and stops: fragments have a share of the slots."""
    here = engine.address
    yes = Message(WELCOME, speaker.incarnation, here.incarnation, sender=3, a=5)
    assert connect_to(engine, speaker, yes) is None
    stuck = engine.submit_send(speaker.name(), bytes(96 << 20), timeout=2.0)
    ask = speaker.hear(RTS)
    assert ask.a == 96 << 20
    speaker.say(here.nics[0], Message(CTS, speaker.incarnation, here.incarnation, to=ask.sender, sender=3, b=ask.b))
    stop(speaker)
    until(lambda: counts(engine)["slots"] >= 16)
    other = Peer("ofi")
    peers.append(other)
    other.call(do="recvs", n=4_000_000, count=1)
    engine.submit_send(desc(other).owner, b"to the other" * 250_000).wait(5)
    until(lambda: len(other.call(do="messages")) == 1)
    assert counts(engine)["slots"] <= 32
    with pytest.raises(fx.TransferTimeout):
        stuck.wait()
    speaker.process.kill()
    stuck.quiesced().wait(10)  # nothing is kept for the dead


def test_nothing_is_left_in_shared_memory(engine: fx.TransferEngine) -> None:
    """Provider shm would leave a file of 13 MB for each endpoint; it is never chosen by itself."""
    d = engine.groups[0].domains[0]
    assert d.provider in ("tcp", "net", "efa")
    assert not [f for f in os.listdir("/dev/shm") if str(os.getpid()) in f and "fi_" in f]


# ---------------------------------------------------------------- quiet means landed, also where completions do not


def stopped(process: subprocess.Popen[str]) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("kind", ["write", "pages", "scatter", "timed out"])
def test_quiet_means_landed(engine: fx.TransferEngine, peers: list[Peer], kind: str) -> None:
    """To a peer that is stopped a small write is complete at once and lands nowhere; it is quiet only when it has landed."""
    p = Peer("ofi")
    peers.append(p)
    d = desc(p)
    buf = engine.alloc(1 << 15)
    buf.array[:] = 9
    h, _ = engine.reg_mr(buf)
    engine.submit_single_write(8, None, (h, 0), (d, 1 << 16), landed=True).wait()
    os.kill(p.pid, signal.SIGSTOP)
    until(lambda: stopped(p.process))
    if kind == "write":
        t = engine.submit_single_write(1 << 15, None, (h, 0), (d, 0))
    elif kind == "pages":
        t = engine.submit_paged_writes(1 << 12, None, (h, fx.Pages(count=8, stride=1 << 12)), (d, fx.Pages(count=8, stride=1 << 12)))
    elif kind == "scatter":
        t = engine.submit_scatter(None, None, h, [fx.ScatterDst(1 << 15, 0, d, 0)])
    else:
        t = engine.submit_single_write(1 << 15, None, (h, 0), (d, 0), timeout=0.2, landed=True)
        with pytest.raises(fx.TransferTimeout):
            t.wait()
    if kind != "timed out":
        t.wait()
    quiet = t.quiesced()
    with pytest.raises(fx.TransferTimeout):
        quiet.wait(0.2)
    os.kill(p.pid, signal.SIGCONT)
    quiet.wait(5)
    t.quiesced().wait(5)  # also when it has been quiet for long
    assert p.call(do="sum", at=0, n=1 << 15) == 9 << 15


def test_what_was_sent_to_a_peer_that_is_lost_is_quiet(engine: fx.TransferEngine, peers: list[Peer]) -> None:
    p = Peer("ofi")
    peers.append(p)
    h, _ = engine.reg_mr(engine.alloc(1 << 15))
    engine.submit_single_write(8, None, (h, 0), (desc(p), 0), landed=True).wait()
    os.kill(p.pid, signal.SIGSTOP)
    until(lambda: stopped(p.process))
    t = engine.submit_single_write(1 << 15, None, (h, 0), (desc(p), 0))
    t.wait()
    quiet = [t.quiesced() for _ in range(3)]
    with pytest.raises(fx.TransferTimeout):
        quiet[0].wait(0.1)
    os.kill(p.pid, signal.SIGKILL)
    for q in quiet:
        q.wait(5)
    t.quiesced().wait(5)


# ---------------------------------------------------------------- messages that are taken back, in any order


def test_taking_back_is_confirmed_in_whatever_order_it_comes(engine: fx.TransferEngine, speaker: Speaker) -> None:
    got: list[bytes] = []
    here, nic = engine.address, engine.address.nics[0]
    speaker.say(nic, speaker.hello(here.incarnation))
    fine = {"session": speaker.incarnation, "target": here.incarnation, "sender": 7, "to": speaker.hear(WELCOME).sender}
    # before it is asked for: the asking that comes late is dropped
    speaker.say(nic, Message(UNRTS, **fine, b=5))
    assert speaker.hear(UNRTS_ACK).b == 5
    engine.submit_recvs(64, 1, lambda m, who: got.append(bytes(m)))
    speaker.say(nic, Message(RTS, **fine, a=4, b=5))
    speaker.say(nic, Message(RTS, **fine, a=4, b=6))
    assert speaker.hear(CTS).b == 6
    # after it was granted: the only receive serves the next one
    speaker.say(nic, Message(UNRTS, **fine, b=6))
    assert speaker.hear(UNRTS_ACK).b == 6
    speaker.say(nic, Message(FRAG, **fine, b=6, body=b"late"))
    speaker.say(nic, Message(RTS, **fine, a=4, b=7))
    assert speaker.hear(CTS).b == 7
    speaker.say(nic, Message(UNRTS, **fine, b=6))  # an old one changes nothing
    speaker.say(nic, Message(FRAG, **fine, body=b"good"))
    until(lambda: got)
    # one that follows before the last is whole
    speaker.say(nic, Message(RTS, **fine, a=8, b=8))
    assert speaker.hear(CTS).b == 8
    speaker.say(nic, Message(RTS, **fine, a=4, b=9))
    speaker.say(nic, Message(UNRTS, **fine, b=9))
    assert speaker.hear(UNRTS_ACK).b == 9
    speaker.say(nic, Message(FRAG, **fine, a=4, body=b"5678"))
    speaker.say(nic, Message(FRAG, **fine, a=0, body=b"1234"))
    until(lambda: len(got) == 2)
    speaker.say(nic, Message(RTS, **fine, a=3, b=10))
    assert speaker.hear(CTS).b == 10
    speaker.say(nic, Message(FRAG, **fine, body=b"end"))
    until(lambda: len(got) == 3)
    assert got == [b"good", b"12345678", b"end"]


def test_fences_are_answered_with_their_number(engine: fx.TransferEngine, speaker: Speaker) -> None:
    here, nic = engine.address, engine.address.nics[0]
    speaker.say(nic, speaker.hello(here.incarnation))
    fine = {"session": speaker.incarnation, "target": here.incarnation, "sender": 7, "to": speaker.hear(WELCOME).sender}
    for n in (1, 2, 2, 9):
        speaker.say(nic, Message(FENCE, **fine, b=n))
        assert speaker.hear(FENCED).b == n
    speaker.say(nic, Message(FENCED, **fine, b=3))  # nobody asked
    speaker.say(nic, Message(FENCE, **fine, b=10))
    assert speaker.hear(FENCED).b == 10
