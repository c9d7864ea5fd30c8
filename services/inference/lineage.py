"""Notices a trainer that went back: a new version whose content an older one had.

A trainer that restarts from a checkpoint publishes the weights of that step again under a new, higher number, for
numbers are never reused. The engine moves to it like to any other version; people who wonder why the reward fell back
want to be told.
"""

from __future__ import annotations

import collections

_REMEMBERED = 256


class Lineage:
    """The contents of the versions that were held, by root hash."""

    def __init__(self) -> None:
        self._version_of: collections.OrderedDict[str, int] = collections.OrderedDict()

    def add(self, policy_version: int, root_hash: str) -> int | None:
        """Remembers a version; the earliest one that had the same content, None if none had."""
        earlier = self._version_of.setdefault(root_hash, policy_version)
        if len(self._version_of) > _REMEMBERED:
            self._version_of.popitem(last=False)
        return None if earlier == policy_version else earlier
