"""A server that does one thing after another, in the order of arrival."""

from __future__ import annotations


class Server:
    """Its queue by Lindley's recursion: a job begins when it has come and the one before it is done."""

    def __init__(self) -> None:
        self._free_s = 0.0
        self.busy_s = 0.0

    def serve(self, now_s: float, work_s: float) -> float:
        """When a job that comes now is done. Calls come in the order of time."""
        self._free_s = max(self._free_s, now_s) + work_s
        self.busy_s += work_s
        return self._free_s
