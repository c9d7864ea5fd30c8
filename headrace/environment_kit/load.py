"""Rules about many episodes at once: capacity, cancellation, isolation."""

from __future__ import annotations

import asyncio
import collections
from typing import NoReturn

import grpc

from headrace.environment_kit.episode import Broken, Episode, Refused, reset
from headrace.environment_kit.rules import RETRY_S, Subject, Unchecked, transcript

# Above the capacity that a server of ours has unless told otherwise.
_MOST_EPISODES = 1100
_TASKS = 8
_END_TIMEOUT_S = 5.0
# Servers whose HTTP/2 library guards against floods of resets close the connection at a thousand within seconds.
_MOST_CANCELLED = 100


async def capacity(subject: Subject) -> None:
    """One episode more than the server takes is refused with RESOURCE_EXHAUSTED, and the others live on."""
    held, refused = await _fill(subject)
    try:
        if refused is None:
            _explain_missing_limit(subject, held)
        survivor = held[0] if held else None
        if survivor is None:
            raise Broken("the server takes no episode at all", refused.episodes[0])
        await survivor.send(subject.reply(0))
    finally:
        await _end(held)
    await _opens_again(subject)


async def cancel(subject: Subject) -> None:
    """A cancelled stream closes its environment within the deadline: its place is free again."""
    held, refused = await _fill(subject)
    kept, again = held, list[Episode]()
    try:
        if refused is None:
            _explain_missing_limit(subject, held)
        cancelled = min(len(held), _MOST_CANCELLED)
        kept = held[cancelled:]
        for episode in held[:cancelled]:
            episode.cancel()
        deadline = asyncio.get_running_loop().time() + subject.settings.close_timeout_s
        while len(again) < cancelled:
            more, refused = await _fill(subject, most=cancelled - len(again))
            again += more
            if refused is not None and asyncio.get_running_loop().time() > deadline:
                taken = cancelled - len(again)
                raise Broken(
                    f"{subject.settings.close_timeout_s:g} s after {cancelled} streams were cancelled, "
                    f"{taken} of their places are still taken",
                    *refused.episodes,
                )
            await asyncio.sleep(RETRY_S)
    finally:
        await _end([*kept, *again])


async def parallel(subject: Subject) -> None:
    """Hundreds of episodes at once each go as they go alone; those that find no room are refused, and later find it."""
    alone = {seed: (await transcript(subject, seed))[1] for seed in range(_TASKS)}
    # An environment that is not reproducible breaks a rule of its own.
    steady = {seed for seed in alone if (await transcript(subject, seed))[1] == alone[seed]}
    known = subject.settings.capacity
    # Where a server takes fewer, half of those that are there at once find no room.
    at_once = asyncio.Semaphore(min(subject.settings.parallel, 2 * known) if known else subject.settings.parallel)
    failed: collections.Counter[str] = collections.Counter()
    examples: dict[str, Episode] = {}

    async def one(number: int) -> None:
        seed = number % _TASKS
        try:
            async with at_once:
                episode, responses = await transcript(subject, seed)
            if seed not in steady or responses == alone[seed]:
                return
            reason = "went otherwise than alone: episodes share state"
        except Broken as broken:
            reason, episode = str(broken), broken.episodes[0]
        failed[reason] += 1
        examples.setdefault(reason, episode)

    async with asyncio.TaskGroup() as tasks:
        for number in range(subject.settings.parallel):
            tasks.create_task(one(number))
    if failed:
        reason, count = failed.most_common(1)[0]
        raise Broken(f"{count} of {subject.settings.parallel} episodes at once: {reason}", examples[reason])


async def _fill(subject: Subject, *, most: int | None = None) -> tuple[list[Episode], Refused | None]:
    """Opens episodes until one is refused for want of room, at most `most`; those that are open, and the refusal."""
    known = subject.settings.capacity
    left = most or (known + 1 if known else _MOST_EPISODES)
    held: list[Episode] = []
    while left:
        batch = [subject.open() for _ in range(min(left, 50))]
        left -= len(batch)
        results = await asyncio.gather(
            *(episode.send(reset(subject.task())) for episode in batch), return_exceptions=True
        )
        held += [episode for episode, result in zip(batch, results, strict=True) if not isinstance(result, Exception)]
        for result in results:
            if isinstance(result, Refused) and result.code == grpc.StatusCode.RESOURCE_EXHAUSTED:
                return held, result
            if isinstance(result, BaseException):
                await _end(held)
                raise result
    return held, None


def _explain_missing_limit(subject: Subject, held: list[Episode]) -> NoReturn:
    known = subject.settings.capacity
    if known:
        raise Broken(f"episode {known + 1} of {known} was not refused with RESOURCE_EXHAUSTED", held[-1])
    raise Unchecked(f"{len(held)} episodes at once did not fill it: start it with a small capacity, give --capacity N")


async def _opens_again(subject: Subject) -> None:
    """Waits until the dropped episodes' places are free, so that the next rule finds room; `cancel` judges that."""
    deadline = asyncio.get_running_loop().time() + subject.settings.close_timeout_s
    while asyncio.get_running_loop().time() < deadline:
        episodes, refused = await _fill(subject, most=1)
        await _end(episodes)
        if refused is None:
            return
        await asyncio.sleep(RETRY_S)


async def _end(episodes: list[Episode]) -> None:
    await asyncio.gather(*(_end_one(episode) for episode in episodes))


async def _end_one(episode: Episode) -> None:
    try:
        async with asyncio.timeout(_END_TIMEOUT_S):
            await episode.end()
    except (Broken, TimeoutError):  # other rules judge how streams end
        episode.cancel()
