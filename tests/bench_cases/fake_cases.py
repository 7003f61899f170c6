"""Cases that go well, are skipped, fail, die and hang: what the harness makes of them is tested in test_bench.py."""

from __future__ import annotations

import os
import time

from fabricx.bench.harness import Case, Measure, Skip


class Good(Case):
    """Two measures: one against a reference, one against the bar; both sides count how often they were called."""

    def __init__(self, side):
        super().__init__(side)
        self.calls = []

    def measures(self):
        return [
            Measure(
                "good", "fake", "pairs", "s", self.ours, self.ref, size=8, reference="other", bar=0.6, note=self.note
            ),
            Measure("good", "fake", "alone", "s", lambda: 4.0, bar=3.0, most=2),
        ]

    def ours(self):
        self.calls.append("ours")
        return 1.0

    def ref(self):
        self.calls.append("ref")
        return 2.0

    def note(self):
        theirs = self.side.swap(self.calls)
        return f"{'same' if theirs == self.calls else 'different'}: {' '.join(self.calls)}"


class Alone(Case):
    sides = 1

    def measures(self):
        return [Measure("alone", "fake", "pid", "", lambda: float(os.getpid()))]


class SkipsBoth(Case):
    def __init__(self, side):
        raise Skip("there is no moon")


class SkipsOne(Case):
    def __init__(self, side):
        if side.rank == 1:
            raise Skip("only side 1 knows why")
        super().__init__(side)
        side.sync()


class Raises(Case):
    def __init__(self, side):
        super().__init__(side)
        if side.rank == 1:
            raise ValueError("a bad value")
        side.sync()


class Dies(Case):
    def measures(self):
        def arm():
            if self.side.rank == 1:
                os._exit(7)
            self.side.sync()
            return 0.0

        return [Measure("dies", "fake", "", "", arm)]


class Hangs(Case):
    sides = 1

    def measures(self):
        return [Measure("hangs", "fake", "", "", lambda: time.sleep(600) or 0.0)]


class Exchanges(Case):
    """Sockets and memory that both sides share."""

    def __init__(self, side):
        super().__init__(side)
        self.tcp, self.unix, self.memory = side.tcp_pair(), side.unix_pair(), side.shared(4096)

    def measures(self):
        return [Measure("exchanges", "fake", "sum", "", self.arm, most=1)]

    def arm(self):
        me, other = self.side.rank + 1, 2 - self.side.rank
        total = 0
        for sock in (self.tcp, self.unix):
            sock.sendall(bytes([me]))
            total += sock.recv(1)[0] * 10
        self.memory.array[self.side.rank] = me
        self.side.sync()
        total += int(self.memory.array[1 - self.side.rank])
        self.side.sync()
        return float(total if total == other * 21 else -1)
