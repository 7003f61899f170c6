"""The shape of one MoE exchange: who owns which expert, how a row lies in memory, how many rows a buffer needs.

Integers only; docs/kernels.md draws the buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

MAX_TOPK = 16
NEAR_UNIT = 16  # bytes; offsets of peer memory are counted in these, so that the compiler knows them aligned
FP8_GROUP = 128  # elements that share one scale in the fused cast
DISPATCH_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32)
COMBINE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def _align(n: int, to: int) -> int:
    return ceil_div(n, to) * to


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in {low}..{high}, not {value!r}")


@dataclass(frozen=True)
class Layout:
    """Everything about an exchange that does not change from round to round.

    Parameters
    ----------
    hidden : int
        Elements in a token, any number from 1.
    experts, ranks : int
        Experts are split over the ranks in contiguous runs; the first ``experts % ranks`` ranks own one more.
    topk : int
        Experts a token is sent to, 1..16. A choice of -1 (or any number outside 0..experts-1) is masked.
    rank : int
        This rank.
    dtype : torch.dtype
        Of a dispatched row: float8_e4m3fn, float8_e5m2, bfloat16, float16 or float32.
    scales : int
        float32 words of scales that travel with each dispatched row; 0 for none.
    combine_dtype : torch.dtype
        Of a combined row: bfloat16, float16 or float32.
    private : int
        Rows a source may send before routes are known, into its own slots at the receiver (P).
    near_first, near_ranks : int
        The ranks whose memory is written directly: ``near_first .. near_first+near_ranks-1``. 0 for none; where there
        are any, this rank is one of them.
    near_rows : int
        Rows a near source has room for at the receiver; see `near_bound`.
    pad : int
        Each expert's segment starts at a multiple of this many rows.
    """

    hidden: int
    experts: int
    ranks: int
    topk: int
    rank: int = 0
    dtype: torch.dtype = torch.bfloat16
    scales: int = 0
    combine_dtype: torch.dtype = torch.bfloat16
    private: int = 32
    near_first: int = 0
    near_ranks: int = 0
    near_rows: int = 0
    pad: int = 1

    def __post_init__(self) -> None:
        _in_range("hidden", self.hidden, 1, 1 << 20)
        _in_range("experts", self.experts, 1, 1 << 16)
        _in_range("ranks", self.ranks, 1, 1 << 14)
        _in_range("topk", self.topk, 1, MAX_TOPK)
        _in_range("rank", self.rank, 0, self.ranks - 1)
        _in_range("scales", self.scales, 0, 1 << 16)
        _in_range("private", self.private, 0, 1 << 20)
        _in_range("near_ranks", self.near_ranks, 0, self.ranks)
        _in_range("near_first", self.near_first, 0, self.ranks - self.near_ranks)
        _in_range("near_rows", self.near_rows, 1 if self.near_ranks else 0, 1 << 24)
        _in_range("pad", self.pad, 1, 1 << 16)
        if self.near_ranks and not self.is_near(self.rank):
            raise ValueError(
                f"rank {self.rank} is not among its own near ranks "
                f"{self.near_first}..{self.near_first + self.near_ranks - 1}"
            )
        if self.dtype not in DISPATCH_DTYPES:
            raise ValueError(f"dtype must be one of {DISPATCH_DTYPES}, not {self.dtype}")
        if self.combine_dtype not in COMBINE_DTYPES:
            raise ValueError(f"combine_dtype must be one of {COMBINE_DTYPES}, not {self.combine_dtype}")

    # -- experts and ranks
    @cached_property
    def base(self) -> int:
        """Experts that every rank owns at least."""
        return self.experts // self.ranks

    @cached_property
    def extra(self) -> int:
        """Ranks (the first ones) that own one expert more than `base`."""
        return self.experts % self.ranks

    def first_expert(self, rank: int) -> int:
        """The first expert of `rank`; ``first_expert(ranks)`` is the number of experts."""
        return rank * self.base + min(rank, self.extra)

    def owner(self, expert: int) -> int:
        """The rank that owns `expert`."""
        big = self.extra * (self.base + 1)
        return expert // (self.base + 1) if expert < big else self.extra + (expert - big) // self.base

    @cached_property
    def local_experts(self) -> int:
        """Experts of this rank."""
        return self.first_expert(self.rank + 1) - self.first_expert(self.rank)

    @cached_property
    def max_local_experts(self) -> int:
        """Experts of the rank that owns most."""
        return self.base + (self.extra > 0)

    def is_near(self, rank: int) -> bool:
        """Whether `rank`'s memory is written directly."""
        return self.near_first <= rank < self.near_first + self.near_ranks

    # -- rows
    @cached_property
    def x_bytes(self) -> int:
        """Bytes of a dispatched token without scales and padding."""
        return self.hidden * self.dtype.itemsize

    @cached_property
    def scale_at(self) -> int:
        """Bytes from the start of a dispatched row to its scales."""
        return _align(self.x_bytes, 4)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a dispatched row: token, scales, padding to a multiple of 16."""
        return _align(self.scale_at + 4 * self.scales, NEAR_UNIT)

    @cached_property
    def y_bytes(self) -> int:
        """Bytes of a combined token without padding."""
        return self.hidden * self.combine_dtype.itemsize

    @cached_property
    def combine_row_bytes(self) -> int:
        """Bytes of a combined row: token, padding to a multiple of 16."""
        return _align(self.y_bytes, NEAR_UNIT)

    # -- sizes of buffers, in rows
    def send_bound(self, tokens: int) -> int:
        """Rows of the dispatch send buffer, and of the combine receive buffer, for up to `tokens` tokens."""
        return tokens * self.topk

    def near_bound(self, tokens: int, distinct: bool = True) -> int:
        """`near_rows` enough for up to `tokens` tokens of a source.

        With `distinct` no token names an expert twice, and the bound is ``tokens * min(topk, experts of a rank)``;
        without, ``tokens * topk``.
        """
        return tokens * (min(self.topk, self.max_local_experts) if distinct else self.topk)

    def receive_bound(self, tokens: int, distinct: bool = True) -> int:
        """Rows of the dispatch receive buffer when each rank has up to `tokens` tokens."""
        most = self.near_bound(tokens, distinct)
        far = self.ranks - self.near_ranks
        return self.near_ranks * self.near_rows + self.ranks * self.private + far * max(most - self.private, 0)

    def return_bound(self, tokens: int, distinct: bool = True) -> int:
        """Rows of the combine send buffer when each rank has up to `tokens` tokens (only far rows lie in it)."""
        return (self.ranks - self.near_ranks) * self.near_bound(tokens, distinct)

    def expert_bound(self, tokens: int, distinct: bool = True) -> int:
        """Rows of the padded expert segments when each rank has up to `tokens` tokens."""
        experts = self.local_experts
        if not experts:
            return 0
        most = self.ranks * tokens * (min(self.topk, experts) if distinct else self.topk)
        return most + min(experts, most) * (self.pad - 1)

    # -- bytes moved: what a roofline is drawn from
    def bytes_dispatch_send(self, tokens: int, rows: int, in_dtype: torch.dtype | None = None) -> int:
        """Bytes that dispatch send reads (tokens, scales, indices) and writes (`rows` rows, positions, counts)."""
        cast = in_dtype is not None and in_dtype != self.dtype
        read = self.hidden * in_dtype.itemsize if cast else self.x_bytes + 4 * self.scales
        return tokens * read + rows * (self.x_bytes + 4 * self.scales) + 8 * tokens * self.topk + 4 * self.experts

    def bytes_dispatch_receive(self, rows: int) -> int:
        """Bytes that dispatch receive reads and writes for `rows` received rows, its maps and counts included."""
        return 2 * rows * (self.x_bytes + 4 * self.scales) + 12 * rows + 4 * self.ranks * self.local_experts

    def bytes_combine_send(self, rows: int) -> int:
        """Bytes that combine send reads and writes for `rows` rows, the maps included."""
        return 2 * rows * self.y_bytes + 12 * rows

    def bytes_combine_receive(self, tokens: int, rows: int, out_itemsize: int = 2, accumulate: bool = False) -> int:
        """Bytes that combine receive reads (`rows` rows, positions, weights) and writes (`tokens` tokens)."""
        out = tokens * self.hidden * out_itemsize
        return rows * self.y_bytes + out * (1 + accumulate) + 8 * tokens * self.topk

    def bytes_route(self, tokens: int) -> int:
        """Bytes that routing alone reads (indices twice) and writes (positions, counts)."""
        return 12 * tokens * self.topk + 4 * self.experts
