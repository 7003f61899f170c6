"""Reads the thread sanitizer's reports: which two lines raced, and whether that is by design.

Run as a program it drives the sanitized build; the test starts it with the sanitizer's library preloaded.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import variants

#: words of the two lines, each with its file -> why a race between just these two does no harm
BY_DESIGN = {
    (
        "request.pxd",
        "p.n += 1",
        "ld_rlx32(&p.n)",
    ): "a hint for those without the pool's lock: a stale one costs a malloc or a free",
    ("request.pxd", "p.n -= 1", "ld_rlx32(&p.n)"): "the same hint",
    (
        "ring.pxd",
        "q.tail = nxt",
        "return q.tail != &q.stub",
    ): "mpsc_some() of one without the lock compares the pointer and never "
    "follows it; what it misses belongs to the lock's holder, who looks after giving it back",
    ("wake.pxi", "g.kicks +=", "g.kicks +="): "a figure for stats(); some may go uncounted",
    ("drive.pxi", "g.sleeps += 1", "g.sleeps += 1"): "a figure for stats(); some may go uncounted",
    ("drive.pxi litmus.pxi", "g.sleeps += 1", "ld_acq64(&g.sleeps)"): "the stress itself looks at the figure",
    ("drive.pxi litmus.pxi", "g.sleeps += 1", "g.sleeps == slept"): "the stress itself looks at the figure",
    (
        "drive.pxi end.pxi",
        "g.sleep_until = 0",
        "r.deadline < g.sleep_until",
    ): "read stale it wakes a worker that is awake already",
    (
        "drive.pxi end.pxi",
        "if g.backlog != NULL and (ns < 0",
        "g.backlog = ",
    ): "who fills the backlog under the lock wakes the worker after",
}

_FRAME = re.compile(r"#\d+ \S+ (?P<path>[^\s:]+):(?P<line>\d+)")
_ACCESS = re.compile(r"^  (?:Previous )?(?:atomic )?(?:read|write) of size", re.IGNORECASE)


def _source(path: str) -> Path:
    for folder in (variants.PYX, variants.HERE):
        p = folder / Path(path).name
        if p.exists():
            return p
    return Path(path)


def _text(path: str, line: int) -> str:
    try:
        return _source(path).read_text().splitlines()[line - 1].strip()
    except (OSError, IndexError):
        return ""


def reports(log: str) -> list[list[tuple[str, str]]]:
    """For each report the accesses in question, as (file, text of the line)."""
    out = []
    for part in log.split("WARNING: ThreadSanitizer: ")[1:]:
        accesses: list[tuple[str, str]] = []
        for block in part.split("\n\n"):
            lines = block.splitlines()
            starts = [i for i, x in enumerate(lines) if _ACCESS.match(x)]
            if not starts:
                continue
            for x in lines[starts[0] :]:
                m = _FRAME.search(x)
                if m and Path(m["path"]).name != "atom.h":  # who called the helper
                    accesses.append((Path(m["path"]).name, _text(m["path"], int(m["line"]))))
                    break
        out.append(accesses or [("?", part[:2000])])
    return out


def by_design(accesses: list[tuple[str, str]]) -> bool:
    """Whether these two lines are known to race, and explained."""
    if len(accesses) != 2:
        return False
    (f, x), (g, y) = accesses
    return any(
        f in files.split() and g in files.split() and ((a in x and b in y) or (b in x and a in y))
        for files, a, b in BY_DESIGN
    )


def exercise(rounds: int) -> dict[str, dict[str, object]]:
    """Everything at once under the sanitizer; no pinning, it needs no tight races."""
    m = variants.load("tsan")
    cores = [-1, -1]
    return {
        "queue": m.queue(3, rounds),
        "stack": m.stack(3, rounds),
        "lone": m.stack(1, rounds // 10),
        "pool": m.pool(4, 3 * rounds),
        "told": m.told(2, rounds),
        "ended": m.ended(rounds // 10, cores),
        "arrival": m.published("arrival", rounds, cores),
        "request": m.published("request", rounds // 3, cores),
        "parked": m.parked(rounds // 3, cores),
        "taken": m.taken(rounds // 3, cores),
        "handed": m.handed_over(rounds // 10, cores),
        "beside": m.woken_beside(rounds // 30),
        "descriptors": m.woken_beside(rounds // 30, descriptors=True),
        "thread": m.mixed(False, rounds // 3),
        "caller": m.mixed(True, rounds // 3),
        "spinning": m.mixed(True, rounds // 3, spin=20, yields=5),
    }


if __name__ == "__main__":
    print(json.dumps(exercise(int(sys.argv[1]))))
