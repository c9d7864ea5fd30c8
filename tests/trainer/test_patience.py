"""services.trainer.patience."""

import asyncio

import pytest

from services.trainer.patience import Patience


async def test_the_first_failures_are_free():
    patience = Patience()
    await asyncio.wait_for(patience.failed(63), 0.05)
    patience.succeeded()
    await asyncio.wait_for(patience.failed(63), 0.05)


@pytest.mark.parametrize("failures", [64 * 7, 64 * 2000])
async def test_a_long_outage_makes_long_pauses_and_no_error(failures):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(Patience().failed(failures), 0.1)
