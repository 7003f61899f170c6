"""The bench: arithmetic of rows, the two processes and what can go wrong with them, references, the command."""

from __future__ import annotations

import json
import mmap
import shutil
import socket
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

import fabricx as fx
from fabricx import _ref
from fabricx.bench import cases_ofi, cases_system, harness, p2p
from fabricx.bench.harness import Channel, Row, quartiles, row_of
from fabricx.bench.programs import Program

FAKES = Path(__file__).parent / "bench_cases"


def report(ours, ref=(), *, bar=None, at_least=False, invert=False):
    head = {"case": "c", "fabric": "f", "metric": "m", "unit": "u", "size": 8, "reference": "r"}
    return {
        "measure": {**head, "bar": bar, "at_least": at_least, "invert": invert},
        "ours": list(ours),
        "ref": list(ref),
        "note": "",
    }


class TestRows:
    def test_the_ratio_is_the_median_of_paired_ratios(self):
        row = row_of(report([1, 2, 30], [2, 2, 3], bar=1.0))
        assert row.ratio == 1.0 and row.value == 2 and row.reference_value == 2
        assert (row.q1, row.q3) == (0.75, 5.5)
        assert row.holds is True and row.pairs == 3

    @pytest.mark.parametrize(
        ("bar", "at_least", "holds"), [(0.4, False, False), (0.6, False, True), (0.4, True, True), (0.6, True, False)]
    )
    def test_a_bar_has_a_good_side(self, bar, at_least, holds):
        assert row_of(report([1], [2], bar=bar, at_least=at_least)).holds is holds

    def test_times_are_inverted_where_the_bar_speaks_of_speed(self):
        assert row_of(report([1], [4], bar=2.0, at_least=True, invert=True)).ratio == 4.0

    def test_without_reference_the_value_is_judged(self):
        row = row_of(report([5, 6, 7], bar=3.0))
        assert row.holds is False and row.ratio == 2.0 and row.reference_value is None

    def test_without_bar_nothing_is_judged(self):
        row = row_of(report([5], [5]))
        assert row.holds is None and row.ratio == 1.0

    def test_quartiles(self):
        assert quartiles([3.0]) == (3.0, 3.0)
        assert quartiles([1, 2, 3, 4, 5]) == (2.0, 4.0)

    def test_as_text(self):
        row = row_of(report([1], [2], bar=0.6))
        assert p2p.show(row) == "c (f), m, 8 B: 1 u; 0.5 of r (0.5 .. 0.5), bar <= 0.6 holds"
        assert p2p.show(Row(case="x", fabric="f", note="skipped: why")) == "x (f): skipped: why"
        assert [p2p.size(n) for n in (0, 8, 1024, 1 << 20, 1500)] == ["", ", 8 B", ", 1 KiB", ", 1 MiB", ", 1500 B"]


class TestChannel:
    @pytest.fixture
    def ends(self):
        a, b = socket.socketpair()
        with a, b:
            yield Channel(a), b

    def test_messages_keep_their_bounds(self, ends):
        channel, raw = ends
        other = Channel(raw)
        for m in ({"a": [1, 2.5, None]}, "x" * 100_000, 7):
            t = threading.Thread(target=channel.put, args=(m,))
            t.start()
            assert other.get(5) == m
            t.join()

    def test_a_length_that_cannot_be_is_refused(self, ends):
        channel, raw = ends
        raw.sendall(struct.pack("<I", harness.MAX_MESSAGE + 1))
        with pytest.raises(fx.ProtocolError, match=str(harness.MAX_MESSAGE + 1)):
            channel.get(5)

    def test_a_cut_message_is_the_end(self, ends):
        channel, raw = ends
        raw.sendall(struct.pack("<I", 100) + b"{")
        raw.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            channel.get(5)

    def test_silence_has_a_deadline(self, ends):
        channel, raw = ends
        raw.sendall(b"\x01")
        with pytest.raises(fx.TransferTimeout):
            channel.get(0.05)


class TestSides:
    @pytest.fixture
    def run(self, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", str(FAKES))
        seen = []

        def go(name, sides=2, limit=30.0, pairs=3):
            rows = harness.run_case(f"fake_cases:{name}", "fake", sides, limit, {"pairs": pairs}, seen.append)
            assert seen == rows
            return rows

        return go

    def test_both_sides_run_the_same_arms_in_changing_order(self, run):
        pairs, alone = run("Good")
        assert pairs.note == "same: ref ours ours ref ref ours ours ref"
        assert pairs.ratio == 0.5 and pairs.pairs == 3 and pairs.holds is True and pairs.size == 8
        assert alone.holds is False and alone.pairs == 2 and alone.reference == "bar"

    def test_a_case_of_one_process_is_not_this_process(self, run):
        import os

        (row,) = run("Alone", sides=1)
        assert row.value != os.getpid()

    @pytest.mark.parametrize(
        ("name", "note"),
        [
            ("SkipsBoth", "skipped: there is no moon"),
            ("SkipsOne", "skipped: only side 1 knows why"),
            ("Raises", "failed: side 1: ValueError: a bad value"),
        ],
    )
    def test_what_went_wrong_is_a_row(self, run, name, note):
        (row,) = run(name)
        assert row.note == note and row.value is None and row.holds is None and row.case == name

    def test_a_side_that_dies_is_a_row(self, run):
        (row,) = run("Dies")
        assert row.note == "failed: side 1: ended with code 7"

    def test_a_side_that_hangs_is_ended(self, run):
        (row,) = run("Hangs", sides=1, limit=2.0)
        assert row.note == "failed: side 0: no answer within 2 s"

    def test_sides_share_sockets_and_memory(self, run):
        (row,) = run("Exchanges")
        assert row.value == 42.0


class TestReferences:
    def test_a_flag_goes_to_and_fro(self):
        memory = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
        a, b = memory.ctypes.data, memory.ctypes.data + 128
        out = []
        t = threading.Thread(target=lambda: out.append(_ref.flag_pingpong(b, a, 50, False, True)))
        t.start()
        assert _ref.flag_pingpong(a, b, 50, True, True) > 0
        t.join(30)
        assert len(out) == 1
        assert memory[:4].view(np.uint32)[0] == memory[128:132].view(np.uint32)[0] == 50

    def test_pages_are_copied_to_their_places(self):
        rng = np.random.default_rng(3)
        src = rng.integers(0, 256, (16, 64), dtype=np.uint8)
        dst = np.zeros_like(src)
        si, di = rng.permutation(16)[:9].astype(np.uint32), rng.permutation(16)[:9].astype(np.uint32)
        _ref.copy_pages(dst.ctypes.data, src.ctypes.data, si, di, 64)
        want = np.zeros_like(src)
        want[di] = src[si]
        assert np.array_equal(dst, want)
        with pytest.raises(ValueError, match="9 source pages and 8"):
            _ref.copy_pages(dst.ctypes.data, src.ctypes.data, si, di[:8], 64)

    @pytest.mark.parametrize("streaming", [False, True])
    def test_slots_are_filled_in_turn(self, streaming):
        src = np.arange(4096 * 3, dtype=np.uint32).view(np.uint8)
        dst = np.zeros_like(src)
        n = src.nbytes // 3
        assert _ref.copy_slots(dst.ctypes.data, src.ctypes.data, n, 3, 2, streaming) > 0
        assert np.array_equal(dst[: 2 * n], src[: 2 * n]) and not dst[2 * n :].any()

    def test_a_copy_is_in_place_before_its_flag(self):
        src, dst, flag = np.full(4096, 9, np.uint8), np.zeros(4096, np.uint8), np.zeros(1, np.uint32)
        _ref.copy_then_flag(dst.ctypes.data, src.ctypes.data, 4096, flag.ctypes.data, 5)
        _ref.flag_wait(flag.ctypes.data, 5)
        assert np.array_equal(src, dst)
        assert _ref.read_all(dst.ctypes.data, 4096) == int(dst.view(np.uint64).astype(object).sum()) % (1 << 64)

    def test_native_calls_are_made(self):
        import ctypes

        seen = []
        f = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_int64)(lambda arg, status: seen.append((arg, status)))
        _ref.native_calls(ctypes.cast(f, ctypes.c_void_p).value, 11, 3)
        assert seen == [(11, 0)] * 3

    def test_the_ring_loses_nothing(self):
        assert _ref.ring_push_pop(5000) > 0

    def test_the_cycle_counter_has_a_rate(self):
        assert 1e6 < _ref.tsc_hz(0.005) < 1e11


class TestPrograms:
    def test_a_program_answers(self):
        p = Program(["sh", "-c", 'while read a b; do echo chatter; echo "ok $b"; done'])
        assert p.number("x 2.5") == 2.5
        p.close()

    @pytest.mark.parametrize(
        ("script", "match"), [("echo error no such thing", "no such thing"), ("exit 3", "ended with code 3")]
    )
    def test_its_errors_are_ours(self, script, match):
        p = Program(["sh", "-c", script])
        with pytest.raises(fx.ProviderError, match=match):
            p.words(timeout=5)
        p.close()

    def test_its_silence_has_a_deadline(self):
        p = Program(["sleep", "60"])
        with pytest.raises(fx.TransferTimeout):
            p.words(timeout=0.05)
        p._p.kill()
        p.close()

    def test_the_bare_libfabric_program_moves_bytes(self, tmp_path):
        if not Path("/usr/include/rdma/fabric.h").exists() or shutil.which("cc") is None:
            pytest.skip("needs a C compiler and libfabric-dev")
        path = cases_ofi.compile_bare(str(tmp_path))
        pair = [Program([path, "libfabric.so.1", "net", "127.0.0.1"]) for _ in range(2)]
        try:
            ready = [p.words("ready") for p in pair]
            for p, there in zip(pair, reversed(ready), strict=True):
                p.number("peer " + " ".join(there))
            for command in ("bw {} 65536 40 16", "pp {} 20"):
                for i, p in enumerate(pair):
                    p.say(command.format(i))
                assert all(float(p.words()[0]) > 0 for p in pair)
            pair[0].say("dance")
            with pytest.raises(fx.ProviderError, match="dance"):
                pair[0].words()
        finally:
            for p in pair:
                p.close()


class TestCommand:
    def test_every_bullet_has_its_cases(self):
        names = {f"{fabric}:{cls.__name__}" for _, fabric, cls in p2p.chosen(None)}
        for need in ("null:Enqueue", "null:PickUp", "null:Pages", "null:Scatter", "null:Callbacks", "local:PingPong",
                     "local:PingPongThread", "local:PingPongNative", "local:Bandwidth", "local:BandwidthThread",
                     "local:BandwidthUnmapped", "local:FirstRead", "local:PagedWrites", "ofi:OfiBandwidth",
                     "ofi:OfiPingPong", "peers:NixlPages", "system:Idle"):  # fmt: skip
            assert need in names

    def test_cases_are_picked_by_a_pattern(self):
        assert [c.__name__ for _, _, c in p2p.chosen("null:scatter")] == ["Scatter"]
        assert {c.__name__ for _, _, c in p2p.chosen("*:pingpong*")} == {"PingPong", "PingPongThread", "PingPongNative"}
        with pytest.raises(fx.OutOfRange, match="null:Scatter|null:scatter"):
            p2p.chosen("teleport")

    @pytest.mark.parametrize("pairs", [0, -1, 10_000])
    def test_the_number_of_pairs_has_a_range(self, pairs):
        with pytest.raises(fx.OutOfRange, match=str(pairs)):
            p2p.run(pairs=pairs, case="null:scatter")

    def test_a_bad_target_is_told_before_anything_runs(self, tmp_path):
        with pytest.raises(fx.OutOfRange, match="there is no directory"):
            p2p.main({"json": str(tmp_path / "no" / "x.json")})
        assert p2p.command(["--case", "teleport"]) == 2
        with pytest.raises(TypeError, match="colour"):
            p2p.main(colour="blue")

    def test_rows_go_to_a_file(self, tmp_path, capsys):
        out = tmp_path / "rows.json"
        words = tmp_path / "rows.md"
        assert (
            p2p.command(["--pairs", "1", "--case", "null:immediates", "--json", str(out), "--markdown", str(words)])
            == 0
        )
        assert "| null | immediates: post and count pages, 8 B |" in words.read_text()
        data = json.loads(out.read_text())
        assert {"cpu", "kernel", "cores", "python", "fabricx", "numpy"} <= set(data["machine"])
        assert len(data["rows"]) == 2
        for row in data["rows"]:
            assert {"case", "fabric", "size", "metric", "value", "unit", "reference", "ratio", "bar", "holds"} <= set(
                row
            )
            assert row["fabric"] == "null" and row["value"] > 0
        assert "post and count pages" in capsys.readouterr().out

    def test_strict_makes_a_failure_an_exit_code(self, monkeypatch):
        bad = p2p.Result(
            p2p.machine(), [Row(case="c", fabric="f", metric="m", value=2.0, bar=1.0, holds=False, unit="u")]
        )
        monkeypatch.setattr(p2p, "run", lambda **k: bad)
        assert p2p.main() == 0
        assert p2p.main(strict=True) == 1

    def test_the_pages_that_land_are_checked(self):
        """The paged case compares every byte; a row with a value says that they were right."""
        ((spec, fabric, cls),) = p2p.chosen("local:pagedwrites")
        rows = harness.run_case(spec, fabric, cls.sides, 60.0, {"pairs": 1, "peers_env": None}, lambda row: None)
        assert [r.note for r in rows] == ["", "", ""] and all(r.value > 0 for r in rows)

    def test_ofi_is_measured_beside_the_bare_program(self):
        ((spec, fabric, cls),) = p2p.chosen("ofi:ofipingpong")
        (row,) = harness.run_case(spec, fabric, cls.sides, 60.0, {"pairs": 1, "peers_env": None}, lambda row: None)
        if row.note.startswith("skipped"):
            pytest.skip(row.note)
        assert row.value > 0 and row.reference_value > 0 and "libfabric" in row.note

    def test_nixl_is_skipped_with_the_reason(self):
        ((spec, fabric, cls),) = p2p.chosen("peers:nixl")
        (row,) = harness.run_case(spec, fabric, cls.sides, 60.0, {"pairs": 1, "peers_env": None}, lambda row: None)
        assert row.note.startswith("skipped: NIXL is measured only in an environment of its own")

    def test_memory_of_a_program_is_read_from_outside(self):
        small = cases_system.memory(cases_system._IDLE)
        large = cases_system.memory("x = b'1' * (64 << 20); " + cases_system._IDLE)
        assert 60 < large[0] - small[0] < 80
        with pytest.raises(RuntimeError, match="ended"):
            cases_system.memory("pass")
