"""Brings versions into a vLLM server beside this process, by its weight-transfer endpoints. As documented for 0.32.

A version comes in checked (weights.py), is written as one safetensors file into a folder that the server sees, and is
loaded from there:

    POST /pause?mode=…           keep: running requests wait; abort: they end with the tokens that they have
    POST /start_weight_update
    POST /update_weights         {"update_info": {"path": folder}}
    POST /finish_weight_update   {"weight_version": "RUN/VERSION"}: only now the server tells of the version
    POST /resume

Whatever fails is tried again from the pause on, for ever: between start and finish the server's weights are neither
version, so it stays paused until an update has gone through. vLLM itself lets go of no pause; a puller that dies in
one is started again, pulls the newest version and ends the pause with it. The last version's file is kept, so that a
server that was restarted gets it back. What a user must correct ends the process.

An update that changes nothing would go unnoticed, and every token after it be labelled wrong: a backend may ignore
update_info, as the TPU's did when this was written. So, where the server has /weight_checker, the sums of its weights
must have changed once the trainer's have.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import aiohttp
import numpy as np
from safetensors import serialize_file

from headrace.errors import StartupError
from services.inference.weights import Version

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_LOOK_PERIOD_S = 2.0
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16"}  # numpy's names to safetensors'


class VllmServer:
    """The server's control endpoints. `held` is the version that it samples with; None before the first."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        weights_folder: Path,
        update: Literal["in_place", "recompute"],
        timeout_s: float,
    ):
        self.held: Version | None = None
        self._session, self._url = session, url.rstrip("/")
        self._folder = weights_folder
        self._pause = "keep" if update == "in_place" else "abort"
        self._timeout_s = timeout_s
        self._held_folder: Path | None = None
        self._lock = asyncio.Lock()  # one update at a time
        self._sums: Any = None  # of the server's weights after the last update
        self._checks = True

    @property
    def policy_version(self) -> int | None:
        """The version that is held; None before the first."""
        return None if self.held is None else self.held.policy_version

    async def install(self, version: Version) -> tuple[float, float]:
        """Brings a version in.

        Returns:
            seconds that writing it took, and from there to its use.

        Raises:
            StartupError: the server refuses what it is asked, or did nothing.
        """
        start_s = time.monotonic()
        folder = (self._folder / f"{version.run_id}-{version.policy_version}").absolute()
        try:
            await asyncio.to_thread(_write, folder, version.tensors)
        except OSError as error:
            raise StartupError(
                f"version {version.policy_version} cannot be written: {error}; make room, or correct"
                " inference.vllm.weights_folder"
            ) from error
        written_s = time.monotonic()
        async with self._lock:
            await self._bring_in(folder, f"{version.run_id}/{version.policy_version}")
            used_s = time.monotonic()
            await self._check_that_it_changed(version)
            self.held = Version(version.run_id, version.policy_version, version.root_hash, {})
            old, self._held_folder = self._held_folder, folder
        if old is not None and old != folder:
            await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)
        return written_s - start_s, used_s - written_s

    async def keep_installed(self) -> None:
        """Brings the held version in again whenever the server has lost it, as one that was restarted has; for ever."""
        while True:
            await asyncio.sleep(_LOOK_PERIOD_S)
            async with self._lock:
                name = await self._name()
                if self.held is None or self._held_folder is None or name in (None, self._held_name):
                    continue
                log.warning("vLLM holds %r, not %s; bringing that in again", name, self._held_name)
                await self._bring_in(self._held_folder, self._held_name)

    async def ready(self) -> bool:
        """Whether the server answers, and holds what was brought in."""
        return self.held is not None and await self._name() == self._held_name

    @property
    def _held_name(self) -> str:
        return f"{self.held.run_id}/{self.held.policy_version}" if self.held else ""

    async def _name(self) -> str | None:
        """What the server calls its weights; None while it does not answer."""
        try:
            return str((await self._ask("GET", "weight_info")).get("weight_version"))
        except (StartupError, _Failure, aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def _bring_in(self, folder: Path, name: str) -> None:
        """Returns once the server has loaded it and goes on."""
        pause_s, again = _FIRST_PAUSE_S, False
        while True:
            try:
                return await self._update(folder, name, again=again)
            except (_Failure, aiohttp.ClientError, OSError, TimeoutError) as error:
                log.warning("vLLM did not take %s, trying again: %s", name, error)
            await asyncio.sleep(pause_s)
            again = True
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _update(self, folder: Path, name: str, *, again: bool) -> None:
        await self._ask("POST", f"pause?mode={self._pause}")
        if again:
            with contextlib.suppress(_Failure):  # an update that failed half-way may be open still
                await self._ask("POST", "finish_weight_update")
        await self._ask("POST", "start_weight_update")
        await self._ask("POST", "update_weights", {"update_info": {"path": str(folder)}})
        await self._ask("POST", "finish_weight_update", {"weight_version": name})
        await self._ask("POST", "resume")

    async def _check_that_it_changed(self, version: Version) -> None:
        if not self._checks:
            return
        try:
            sums = (await self._ask("POST", "weight_checker", {"action": "checksum"})).get("checksums")
        except (StartupError, _Failure, aiohttp.ClientError, OSError, TimeoutError) as error:
            self._checks = False
            log.warning("whether updates change vLLM's weights cannot be checked: %s", error)
            return
        if self.held is not None and version.root_hash != self.held.root_hash:
            if sums == self._sums:
                raise StartupError(
                    f"{self._url} took version {version.policy_version} and changed no weight: its weight-transfer"
                    " backend ignores update_info; see docs/vllm.md"
                )
            self._checks = False  # seen once, it is true of every update
        self._sums = sums

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        async with asyncio.timeout(self._timeout_s):
            async with self._session.request(method, f"{self._url}/{path}", json=body) as response:
                data = await response.read()
        if response.status == 200:
            with contextlib.suppress(ValueError):  # some say nothing but 200
                reply = json.loads(data)
                return reply if isinstance(reply, dict) else {}
            return {}
        text = f"/{path} answers {response.status}: {' '.join(data[:300].decode(errors='replace').split())}"
        if response.status == 404:
            raise StartupError(f"{self._url}{text}; start vLLM with VLLM_SERVER_DEV_MODE=1")
        if 400 <= response.status < 500 and response.status not in (408, 409, 429):
            raise StartupError(f"{self._url}{text}; see docs/vllm.md")
        raise _Failure(text)


class _Failure(Exception):
    """The server could not do it now."""


def _write(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A folder with the tensors in one file, in sight only when it is whole."""
    draft = folder.with_name(f"{folder.name}.draft")
    for old in (draft, folder):
        shutil.rmtree(old, ignore_errors=True)
    draft.mkdir(parents=True)
    data = {
        name: {
            "dtype": _DTYPES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data": np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).tobytes(),
        }
        for name, tensor in tensors.items()
    }
    serialize_file(data, draft / "model.safetensors", {"format": "pt"})
    draft.rename(folder)
