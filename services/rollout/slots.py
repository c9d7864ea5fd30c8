"""Places for the episodes that a gateway runs at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Slots:
    """A number of places. `changed` is set whenever some come free, and by whoever else has news for those who wait."""

    def __init__(self, count: int):
        self.free = count
        self.changed = asyncio.Event()

    def lease(self, count: int) -> Lease:
        """Takes places, which must be free."""
        assert self.free >= count
        self.free -= count
        return Lease(self, count)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds; it is looked at again after each change."""
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    def give(self, count: int) -> None:
        """Frees places."""
        self.free += count
        self.changed.set()


class Lease:
    """Places taken. They may come back one by one; `close` gives back the rest."""

    def __init__(self, slots: Slots, count: int):
        self.count = count
        self._slots = slots

    def give(self, count: int = 1) -> None:
        """Gives some back."""
        assert self.count >= count
        self.count -= count
        self._slots.give(count)

    def close(self) -> None:
        """Gives back what is left."""
        self.give(self.count)
