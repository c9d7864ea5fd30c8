"""Where a step's wall time went."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds by what they were spent on, since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: Counter[str] = Counter()

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Adds the body's wall time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[what] += time.perf_counter() - start  # type: ignore[assignment]

    def spent_s(self, what: str) -> float:
        """Seconds spent on it so far."""
        return float(self._seconds[what])

    @property
    def total_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start
