"""Who gets a version from whom, so that the trainer sends about one copy however many engines there are.

The first engine to hear of a version gets it from the trainer, and the others from engines before them, two from each:
a tree, through which each tensor passes as soon as it has been checked. An engine gets a difference only from one that
gets the same difference; engines at different versions make different trees. Whoever comes when others hold the version
already gets it from those. An engine is told its parent and that one's ancestors, who wait for nobody below them, and
falls back to them and to the trainer in the end. One that asks again keeps its place, unless everybody above it has
gone or, as it says, failed: then it gets another, never below itself. So nobody ever waits for somebody who waits for
him, and the death of whoever got the version from the trainer costs what the trainer had sent him, not a copy for each
of his children: the first child to ask takes his place or one below his siblings, and the others find theirs below.

Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from headrace.v1 import trainer_service_pb2 as pb

_CHILDREN = 2
_MOST_PEERS = 3


@dataclass(frozen=True)
class Watcher:
    """An engine that watches: the version that it holds (0: none), and where it serves ("": nowhere)."""

    held: int
    address: str


@dataclass
class _Member:
    base: int | None
    parent: str | None  # None: the trainer, or somebody who held the version already
    children: int = 0


class Fanout:
    """The trees of the newest version."""

    def __init__(self) -> None:
        self._version = 0
        self._members: dict[str, _Member] = {}

    def peers(
        self,
        engine: str,
        version: int,
        base: int | None,
        watchers: Mapping[str, Watcher],
        failed: Collection[str] = (),
    ) -> list[pb.WeightPeer]:
        """Whom an engine asks for a version before the trainer, in order.

        Args:
            base: the version that it holds, if the trainer would send the difference to it.
            watchers: those that watch now, by name.
            failed: addresses at which it got nothing. Whether they are dead, only their own watches tell.
        """
        watchers = {
            name: watcher for name, watcher in watchers.items() if name == engine or watcher.address not in failed
        }
        if version != self._version:
            self._version, self._members = version, {}
        members = self._members
        holders = [
            name
            for name, watcher in watchers.items()
            if watcher.held == version and watcher.address and name != engine and self._serves(name, base)
        ]
        if holders:
            chosen = sorted(holders, key=self._children)[:_CHILDREN]
            members.setdefault(chosen[0], _Member(None, None)).children += 1
            members.setdefault(engine, _Member(base, None))
            return _listed(chosen, watchers)
        if engine in members and members[engine].base == base:
            ancestors = self._ancestors(engine)
            if not ancestors or any(name in watchers for name in ancestors):
                return _listed(ancestors, watchers)
        parents = (
            name
            for name, member in members.items()
            if member.children < _CHILDREN
            and name in watchers
            and watchers[name].address
            and self._serves(name, base)
            and engine not in (name, *self._ancestors(name))
        )
        parent = next(parents, None)
        member = members.setdefault(engine, _Member(base, None))
        member.base, member.parent = base, parent
        if parent:
            members[parent].children += 1
        return _listed(self._ancestors(engine), watchers)

    def _ancestors(self, engine: str) -> list[str]:
        """The parent first."""
        ancestors = []
        parent = self._members[engine].parent
        while parent is not None:
            ancestors.append(parent)
            parent = self._members[parent].parent
        return ancestors

    def _serves(self, name: str, base: int | None) -> bool:
        """Whether it could send what is wanted: all of it, or the difference that it got itself."""
        return base is None or (name in self._members and self._members[name].base == base)

    def _children(self, name: str) -> int:
        return self._members[name].children if name in self._members else 0


def _listed(names: Sequence[str], watchers: Mapping[str, Watcher]) -> list[pb.WeightPeer]:
    return [
        pb.WeightPeer(address=watchers[name].address, policy_version=watchers[name].held)
        for name in names
        if name in watchers and watchers[name].address
    ][:_MOST_PEERS]
