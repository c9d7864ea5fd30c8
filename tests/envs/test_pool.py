"""services.envs.pool: resources started ahead, checked when they are handed out, closed at the end."""

import asyncio

import pytest

from services.envs.pool import Pool, PoolError


class Maker:
    """Makes numbered resources; dead ones are in `dead`, closed ones in `closed`."""

    def __init__(self) -> None:
        self.made = 0
        self.dead: set[int] = set()
        self.closed: list[int] = []
        self.broken: str | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def make(self) -> int:
        await self.gate.wait()
        if self.broken:
            raise OSError(self.broken)
        self.made += 1
        return self.made

    def check(self, number: int) -> bool:
        return number not in self.dead

    async def close(self, number: int) -> None:
        self.closed.append(number)


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the maker tells no event
            await asyncio.sleep(0.005)


def pool(maker: Maker, **settings) -> Pool[int]:
    return Pool(maker.make, check=maker.check, close=maker.close, **settings)


async def test_they_are_made_ahead_and_replaced():
    maker = Maker()
    async with pool(maker, size=3) as numbers:
        await until(lambda: maker.made == 3)
        first = await numbers.acquire()
        await until(lambda: maker.made == 4)
        await numbers.release(first)
        await until(lambda: maker.closed == [first])
        held = await numbers.acquire()
        await until(lambda: maker.made == 5)
    assert sorted(maker.closed) == [1, 2, 3, 4, 5] and held in maker.closed


async def test_a_dead_one_is_never_handed_out():
    maker = Maker()
    async with pool(maker, size=3) as numbers:
        await until(lambda: maker.made == 3)
        maker.dead = {1, 2, 3}
        assert await numbers.acquire() == 4
        assert maker.closed == [1, 2, 3]


@pytest.mark.parametrize("how", ["raises", "hangs", "awaits"])
async def test_a_check_that_raises_or_hangs_is_a_no(how):
    maker = Maker()

    async def check(number: int) -> bool:
        if number == 1 and how == "raises":
            raise ConnectionError("gone")
        if number == 1 and how == "hangs":
            await asyncio.Event().wait()
        return number != 1

    async with Pool(maker.make, size=1, check=check, close=maker.close, check_timeout_s=0.05) as numbers:
        assert await numbers.acquire() == 2


async def test_most_is_a_bound_and_release_hands_on():
    maker = Maker()
    async with pool(maker, size=1, most=2) as numbers:
        first, second = await numbers.acquire(), await numbers.acquire()
        with pytest.raises(PoolError, match=r"no pool resource within 0\.05 s: all are out"):
            await numbers.acquire(timeout_s=0.05)
        waiting = asyncio.create_task(numbers.acquire())
        await numbers.release(first, reuse=True)
        assert await waiting == first and maker.made == 2
        await numbers.release(second)
        assert await numbers.acquire() == 3


async def test_it_comes_back_when_making_works_again():
    maker = Maker()
    async with pool(maker, size=1) as numbers:
        maker.broken = "the disk is full"
        await numbers.acquire()
        with pytest.raises(PoolError, match="making one raised OSError: the disk is full"):
            await numbers.acquire(timeout_s=0.1)
        maker.broken = None
        assert await numbers.acquire() == 2


async def test_a_maker_that_never_works_fails_the_start():
    maker = Maker()
    maker.broken = "no such image"
    with pytest.raises(OSError, match="no such image"):
        async with pool(maker, size=1):
            pass


async def test_the_end_waits_for_no_maker_and_forgives_a_late_release():
    maker = Maker()
    async with pool(maker, size=2) as numbers:
        await until(lambda: maker.made == 2)
        maker.gate.clear()
        async with numbers.resource() as number:
            assert number == 1
        held = await numbers.acquire()
    await numbers.release(held)
    assert sorted(maker.closed) == [1, 2]


async def test_a_close_that_raises_costs_nothing():
    maker = Maker()

    def close(number: int) -> None:
        raise OSError("already gone")

    async with Pool(maker.make, size=1, close=close) as numbers:
        await numbers.release(await numbers.acquire())
        assert await numbers.acquire() == 2


def test_sizes_that_make_no_pool_are_refused():
    for settings in ({"size": 0}, {"size": 2, "most": 1}):
        with pytest.raises(ValueError, match="at least 1"):
            pool(Maker(), **settings)
