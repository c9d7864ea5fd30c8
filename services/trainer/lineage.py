"""How old the weights of a version are: the number of updates between them and the current ones.

Without a restart that is the difference of version numbers. A trainer that restarts from checkpoint c publishes the
restored weights again, under a new number n, and the numbers between c and n name weights that no longer lie behind
the current ones: they had run ahead. Their distance is what counts for off-policy data, so it is counted from c
forward:

    before the kill   c ── c+1 ── … ── n-1          age of c+1 right after the restart: 1
    after it          n ── n+1 ── …                 age of c: 0, of n: 0; each update adds 1 to all

A run's first version is 1. A trainer that finds it taken and has no checkpoint begins again from its weights.
"""

from __future__ import annotations

from collections.abc import Mapping

_FIRST = 1
_KEPT = 1024


class Lineage:
    """The versions published so far and how far each is from the newest."""

    def __init__(self, positions: Mapping[int, int] | None = None):
        """`positions` is what a checkpoint kept of the lineage that it belongs to."""
        self._positions = dict(positions or {})

    @property
    def newest(self) -> int:
        """The newest version; 0 before the first."""
        return max(self._positions, default=0)

    @property
    def positions(self) -> dict[int, int]:
        """Version → number of updates before it; what a checkpoint keeps."""
        return dict(self._positions)

    def publish(self, version: int, *, updated: bool = True) -> None:
        """Notes a new version, of weights that an update has changed or of the same ones as the newest version's."""
        if not self._positions and version > _FIRST:
            self._positions, updated = {_FIRST: 0}, False
        newest = self.newest
        assert version > newest, f"version {version} does not follow {newest}"
        here = self._positions.get(newest, 0)
        if not updated:
            ahead = range(max(newest + 1, version - _KEPT), version)
            self._positions |= {lost: here - (lost - newest) for lost in ahead}
        self._positions[version] = here + updated
        self._positions = dict(sorted(self._positions.items())[-_KEPT:])

    def age(self, version: int) -> int:
        """Updates between a version's weights and the newest. A forgotten version is older than all that are known.

        Raises:
            ValueError: the version has not been published.
        """
        now = self._positions.get(self.newest, 0)
        if version in self._positions:
            return now - self._positions[version]
        if version > self.newest or version < 1:
            raise ValueError(f"policy_version {version} has not been published; the newest is {self.newest}")
        return now - min(self._positions.values()) + 1
