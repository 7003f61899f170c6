"""What the host does for a page: instructions by callgrind, beside a bandwidth tool's loop over the same provider; doorbells;
allocations. Soft-RoCE can not tell how fast a NIC would be, but what is counted here is the same for any NIC."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
THOROUGH = (
    "go",
    "step",
    "complete",
    "carry_out",
    "post_send",
    "poll_cq",
    "post_srq_recv",
    "add_receives",
    "accept_work",
)
PROVIDER = ("quick_post_send", "quick_poll")
#: what posts and polls, by side
ROOTS = {"fabric": ("*verbs_post_pages", "*verbs_verbs_poll"), "reference": ("reference_loop",)}

pytestmark = [
    pytest.mark.skipif(not shutil.which("valgrind"), reason="valgrind is not installed"),
    pytest.mark.usefixtures("soft"),
]


def by_function(path: Path) -> Counter[str]:
    """Instructions in each function itself, from callgrind's output."""
    cost: Counter[str] = Counter()
    name, skip = "", False
    for line in path.read_text().splitlines():
        if line.startswith("fn="):
            name = line[3:].split("'")[0]
        elif line.startswith("calls="):
            skip = True  # the next line is what the callee took
        elif re.match(r"[+*\-\d]", line) and name:
            if not skip:
                cost[name] += int(line.split()[1])
            skip = False
    return cost


def count(side: str, chain: int, folder: Path) -> dict[str, float]:
    """Instructions a page: all, and without the provider's; doorbells a page; calls of an allocator."""
    out = folder / f"{side}.{chain}"
    command = [
        "valgrind",
        "--tool=callgrind",
        f"--callgrind-out-file={out}",
        "--compress-strings=no",
        "--compress-pos=no",
    ]
    command += [f"--toggle-collect={f}" for f in ROOTS[side]]
    command += [sys.executable, str(HERE / "cost_pages.py"), side, str(chain)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages, posts, rings = map(int, done.stdout.split()[-3:])
    assert posts == pages
    cost = by_function(out)
    for f in [f for f in cost if f in THOROUGH]:  # the handshake before
        del cost[f]
    theirs = sum(n for f, n in cost.items() if f in PROVIDER)
    assert theirs > 0
    heap = {f for f in cost if re.search(r"alloc|^free|_PyObject_|new_nonzero", f)}
    return {
        "all": sum(cost.values()) / pages,
        "own": (sum(cost.values()) - theirs) / pages,
        "doorbells": rings / pages,
        "heap": len(heap),
    }


@pytest.mark.timeout(600)
def test_a_page_costs_little_more_than_in_a_bandwidth_tool(tmp_path: Path) -> None:
    ours, tool = count("fabric", 4, tmp_path), count("reference", 4, tmp_path)
    said = f"ours {ours}, a bandwidth tool's loop {tool}"
    print(said)
    assert ours["all"] <= 1.5 * tool["all"], said
    assert ours["doorbells"] <= 0.26, said
    assert ours["heap"] == 0, said
