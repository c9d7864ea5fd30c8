"""Which part of the prefix cache a request uses. Pure.

Keys and values are valid only for the weights that computed them, so every request lives in a namespace of the cache,
named by a version. How, depends on what a swap does to running requests (`inference.update`).

`in_place`: the namespace is the version that was held when the request, or its episode, began to be computed. A first
turn gets the version that is held. A later turn brings the namespace of its first turn and finds its own keys there,
which older weights computed: the same mixture as in a request that runs across a swap. A later turn that brings a
version newer than the one held (its episode began on an engine that is ahead) gets a namespace apart: what old weights
compute for it must not be found by first turns once this engine holds that version. So a first turn only ever finds
what its own version computed.

`recompute`: the namespace is the version that is held, whatever a request brings, so that no token is ever sampled from
keys of other weights; the first later turn after a swap computes its prefix again.
"""

from __future__ import annotations

from typing import Literal

Update = Literal["in_place", "recompute"]


class Namespace(str):
    """A part of the prefix cache; remembers what the request asked for."""

    asked: str | None


def namespace(asked: str | None, held: int, update: Update) -> Namespace:
    """Where a request that asks for `asked` looks for prefixes while version `held` is held.

    Args:
        asked: None in a first turn; the version under which the episode started in a later one; else a client's own
            salt (the stock API has one), which stays apart for each version.
        held: the version that is held.
        update: what a swap does to running requests.
    """
    if asked is None:
        name = str(held)
    elif not (asked.isascii() and asked.isdecimal()):
        name = f"{held} salted {asked}"
    elif update == "recompute":
        name = str(held)
    else:
        name = asked if int(asked) <= held else f"{asked} under {held}"
    space = Namespace(name)
    space.asked = asked
    return space
