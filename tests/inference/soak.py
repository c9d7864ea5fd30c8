"""Swaps one after another while requests never cease: what an engine must go through for days."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from tests.inference.engine import Engine

CLIENTS, NEW, PROMPT = 8, 40, 24


@dataclasses.dataclass(frozen=True)
class Soak:
    """`errors` are mean |difference| to the reference's logprobs and `resident_bytes` the memory, one a swap."""

    replies: list[dict[str, Any]]
    errors: np.ndarray
    largest_error: float
    resident_bytes: np.ndarray


async def soak(engine: Engine, swaps: int, *, checked: int = 2) -> Soak:
    """Publishes so many versions under load; after each swap `checked` of its replies are compared."""
    replies: list[tuple[list[int], dict[str, Any]]] = []
    ending = asyncio.Event()

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        turn = 0
        while not ending.is_set():
            prompt = engine.prompt(PROMPT, seed=1000 * number + turn % 50)
            replies.append((prompt, await engine.call(session, prompt, NEW)))
            turn += 1

    means, largest, resident = [], [], []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            tasks.create_task(client(session, number))
        for _ in range(swaps):
            seen = len(replies)
            await asyncio.to_thread(engine.publish, engine.newest + 1)
            await asyncio.to_thread(engine.wait_for, lambda seen=seen: len(replies) >= seen + CLIENTS)
            errors = [engine.errors(*pair) for pair in replies[-checked:]]
            means.append(float(np.concatenate(errors).mean()))
            largest.append(float(np.concatenate(errors).max()))
            resident.append(resident_bytes(engine.process.pid))
            for old in sorted(engine.versions)[:-5]:  # long before what any reply still names
                with contextlib.suppress(KeyError):
                    del engine.versions[old]
        ending.set()
    return Soak([reply for _, reply in replies], np.array(means), max(largest), np.array(resident))


def resident_bytes(pid: int) -> int:
    """Memory that a process has in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
