"""The control block of one round in flight: arrival counters, epochs, the status of waits, addresses of flags.

A block is an int32 tensor in device memory that kernels read and write; its words are laid out here, for host code and
for signals.py. What several programs write at once lies on cache lines of its own.
"""

from __future__ import annotations

import torch

LINE = 32  # int32 words in a cache line

# Each of the five signals has a line: a 64-bit arrival counter (low half: programs arrived, high half: of those,
# failed) and the epoch, which is the number of rounds in which this signal was given.
COUNTS, FAR, NEAR, BACK_FAR, BACK_NEAR = range(5)
SIGNALS = ("counts", "far", "near", "back_far", "back_near")
COUNTER, EPOCH = 0, 2  # words in a signal's line

META = 5 * LINE
STATUS, TIMEOUT, PEERS = META, META + 1, META + 2
ABORT = META + 4  # addresses from here on: two words each
FLAG = META + 6  # of counts, far, back_far: FLAG + 2 * _FLAG_OF[signal]
_FLAG_OF = {COUNTS: 0, FAR: 1, BACK_FAR: 2}
NEAR_FLAGS = META + LINE  # addresses of the near ranks' flags: first those of dispatch, then those of combine

OK, TIMED_OUT, ABORTED = 0, 1, 2  # values of the status word
_NAMES = {TIMED_OUT: "timed out", ABORTED: "aborted"}


def control_words(near_ranks: int) -> int:
    """int32 words of a control block for `near_ranks` near ranks."""
    return NEAR_FLAGS + -(-4 * near_ranks // LINE) * LINE


def _address(what: torch.Tensor | int | None, name: str) -> int:
    if what is None:
        return 0
    if isinstance(what, int):
        address = what
    else:
        if what.dtype not in (torch.int32, torch.uint32):
            raise TypeError(f"{name} must be an int32 or uint32 tensor, not {what.dtype}")
        address = what.data_ptr()
    if address % 4:
        raise ValueError(f"{name} at {address:#x} is not aligned to 4 bytes")
    return address


def new_control(
    device: torch.device | str,
    *,
    timeout: float = 10.0,
    counts: torch.Tensor | int | None = None,
    far: torch.Tensor | int | None = None,
    back_far: torch.Tensor | int | None = None,
    near: list | tuple = (),
    back_near: list | tuple = (),
    abort: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """A control block for one round in flight.

    Every flag is a u32 word, given as a tensor or as an address that kernels of `device` can write (device memory, a
    peer's memory, mapped pinned host memory). It is raised to the epoch, which grows by one a round and wraps; compare
    with ``(flag - epoch) as int32 >= 0``. None: not raised. The block keeps addresses only: the caller keeps the
    memory.

    Parameters
    ----------
    timeout : float
        Seconds that any wait of a kernel may take, up to 4,294.
    counts, far, back_far
        Flags for this rank's proxy: counts are published; far rows of dispatch, of combine, are in the send buffer.
    near, back_near
        A flag in each near rank's memory, in rank order: this rank's rows of dispatch, of combine, are there.
    abort
        A u32 word; not zero: every wait gives up. Read by one program of a grid, and only while it waits.

    Returns
    -------
    torch.Tensor
        int32 [control_words(len(near))] on `device`.
    """
    if len(near) != len(back_near):
        raise ValueError(f"near has {len(near)} flags and back_near {len(back_near)}: each near rank needs both")
    micros = round(timeout * 1e6)
    if not 1 <= micros < 1 << 32:
        raise ValueError(f"timeout must be in 1e-6..4294 seconds, not {timeout}")
    block = torch.zeros(control_words(len(near)), dtype=torch.int32)
    words = block.numpy().view("uint32")
    words[TIMEOUT], words[PEERS] = micros, len(near)
    pairs = block.numpy().view("uint64")
    pairs[ABORT // 2] = _address(abort, "abort")
    for name, signal, what in (("counts", COUNTS, counts), ("far", FAR, far), ("back_far", BACK_FAR, back_far)):
        pairs[FLAG // 2 + _FLAG_OF[signal]] = _address(what, name)
    for i, flag in enumerate([*near, *back_near]):
        pairs[NEAR_FLAGS // 2 + i] = _address(flag, f"near flag {i}")
    return block.to(device)


def read_status(control: torch.Tensor) -> int:
    """0, or why a wait gave up: `TIMED_OUT` or `ABORTED`. Waits for the device."""
    return int(control[STATUS].item())


def status_text(status: int) -> str:
    """A status in words."""
    return _NAMES.get(status, "fine" if status == OK else f"unknown status {status}")


def clear_status(control: torch.Tensor) -> None:
    """Let kernels wait again after a round that failed; counters and epochs are in order as they are."""
    control[STATUS].zero_()


def read_epochs(control: torch.Tensor) -> dict[str, int]:
    """Rounds completed by each signal: counts, far, near, back_far, back_near. Waits for the device."""
    words = control.cpu()
    return {name: int(words[i * LINE + EPOCH]) & 0xFFFFFFFF for i, name in enumerate(SIGNALS)}
