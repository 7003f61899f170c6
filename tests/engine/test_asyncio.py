"""Awaiting transfers: from any loop, one wake-up a batch, and a cancelled task leaves the transfer alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from engines import Pair

import fabricx as fx


def test_await_many_in_one_loop(pair: Pair) -> None:
    async def main() -> None:
        waits = [pair.b.expect_imm_count(5, 1) for _ in range(500)]
        for _ in range(500):
            pair.write(8, 5)
        await asyncio.gather(*waits)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_one_wake_up_a_batch(pairs: Callable[..., Pair]) -> None:
    pair = pairs()

    async def main() -> int:
        loop = asyncio.get_running_loop()
        waits = [asyncio.ensure_future(_wait(pair.b.expect_imm_count(5, 1))) for _ in range(200)]
        await asyncio.sleep(0)
        turns = 0

        def count() -> None:
            nonlocal turns
            turns += 1

        selector = loop._selector  # type: ignore[attr-defined]
        select = selector.select

        def counted(timeout: float | None = None) -> object:
            events = select(timeout)
            if events:
                count()
            return events

        selector.select = counted
        pages = fx.Pages(stride=8, count=200)
        pair.a.submit_paged_writes(8, 5, (pair.handle, pages), (pair.desc, pages))  # one entry, 200 counts
        await asyncio.gather(*waits)
        selector.select = select
        return turns

    assert asyncio.run(asyncio.wait_for(main(), 10)) < 50


async def _wait(t: fx.Transfer) -> None:
    await t


def test_what_is_over_does_not_suspend(pair: Pair) -> None:
    async def main() -> None:
        t = pair.write(8)
        t.wait()
        await t
        x = pair.b.expect_imm_count(5, 1)
        x.cancel()
        with pytest.raises(fx.TransferCancelled):
            await x

    asyncio.run(main())


def test_failures_are_raised_at_the_await(pair: Pair) -> None:
    async def main() -> None:
        with pytest.raises(fx.TransferTimeout):
            await pair.b.expect_imm_count(5, 1, timeout=0.03)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_several_tasks_and_several_loops_wait_for_one_transfer(pair: Pair) -> None:
    x = pair.b.expect_imm_count(5, 1)
    ended: list[int] = []

    async def main(k: int) -> None:
        await asyncio.gather(*(_wait(x) for _ in range(3)))
        ended.append(k)

    threads = [threading.Thread(target=lambda k=k: asyncio.run(asyncio.wait_for(main(k), 10))) for k in range(4)]
    for t in threads:
        t.start()
    while pair.b.stats()["groups"][0]["pending"] < 3:
        threading.Event().wait(0.001)
    pair.write(0, 5)
    for t in threads:
        t.join(10)
    assert sorted(ended) == [0, 1, 2, 3]


def test_a_cancelled_task_leaves_the_transfer_alone(pair: Pair) -> None:
    async def main() -> None:
        x = pair.b.expect_imm_count(5, 1)
        other = asyncio.create_task(_wait(x))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_wait(x), 0.02)
        assert not x.done()
        pair.write(0, 5)
        await other
        await x

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_task_cancelled_and_awaited_again(pair: Pair) -> None:
    async def main() -> None:
        x = pair.b.expect_imm_count(5, 1)
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(_wait(x), 0.01)
        pair.write(0, 5)
        await x

    asyncio.run(asyncio.wait_for(main(), 10))


def test_the_engine_is_an_async_context_manager() -> None:
    async def main() -> None:
        async with fx.TransferEngine("local") as e:
            assert not e.closed
        assert e.closed

    asyncio.run(main())


def test_cancelling_one_of_several_awaiting_tasks_leaves_the_others(pair: Pair) -> None:
    async def main() -> None:
        x = pair.b.expect_imm_count(5, 1)
        tasks = [asyncio.create_task(_wait(x)) for _ in range(4)]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        tasks[2].cancel()
        await asyncio.sleep(0.01)
        assert [t.done() for t in tasks] == [True, False, True, False]
        pair.write(0, 5)
        await asyncio.gather(tasks[1], tasks[3])

    asyncio.run(asyncio.wait_for(main(), 10))
