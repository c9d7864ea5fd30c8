"""The puller of a vLLM server, against a scripted server that follows vLLM's documented schema."""

import asyncio
import contextlib
import json
import sys

import aiohttp
import ml_dtypes
import numpy as np
import pytest
from aiohttp import web

from headrace import config
from headrace.errors import StartupError
from services.inference.vllm import VllmServer
from services.inference.weights import Version
from tests.inference.trainer import Trainer
from tests.processes import ROOT, Process, free_port
from tests.rollout.rig import eventually
from tests.scripted_vllm import Script, ScriptedVllm

PHASES = ["start_weight_update", "update_weights", "finish_weight_update", "resume"]


def tensors(number):
    return {
        "a": np.full((2, 3), number, np.float32),
        "b": np.arange(5).astype(ml_dtypes.bfloat16) + np.asarray(number, ml_dtypes.bfloat16),
        "scalar": np.asarray(number, np.float32),
    }


def version(number, content=None):
    content = number if content is None else content
    return Version("run", number, f"root-{content}", tensors(content))


@contextlib.asynccontextmanager
async def pair(tmp_path, script=None, *, update="in_place"):
    """A scripted server, and its control as the puller has it."""
    server = await ScriptedVllm.start(script)
    async with aiohttp.ClientSession() as session:
        yield server, VllmServer(session, server.url, weights_folder=tmp_path / "w", update=update, timeout_s=60)
    await server.stop()


async def test_a_version_is_loaded_bit_for_bit_in_the_documented_order(tmp_path):
    async with pair(tmp_path) as (server, control):
        await control.install(version(3))
        assert [path for path in server.controls if path != "weight_checker"] == ["pause?mode=keep", *PHASES]
        assert server.weight_version == "run/3" and control.policy_version == 3
        assert await control.ready()
        for name, tensor in tensors(3).items():
            assert server.tensors[name].dtype == tensor.dtype and server.tensors[name].shape == tensor.shape
            assert server.tensors[name].tobytes() == tensor.tobytes()
        await control.install(version(4))
        assert [folder.name for folder in (tmp_path / "w").iterdir()] == ["run-4"]


class Terse(ScriptedVllm):
    """Says nothing but 200 to what changes something."""

    def _control(self, path, mode, body):
        response = super()._control(path, mode, body)
        return web.Response() if response.status == 200 and path.split("?")[0] in ("pause", *PHASES) else response


async def test_a_server_that_says_nothing_but_200_is_understood(tmp_path):
    server = await Terse.start()
    async with aiohttp.ClientSession() as session:
        control = VllmServer(session, server.url, weights_folder=tmp_path, update="in_place", timeout_s=60)
        await control.install(version(3))
        assert server.weight_version == "run/3" and await control.ready()
    await server.stop()


async def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "w").touch()
    async with pair(tmp_path) as (server, control):
        with pytest.raises(StartupError, match=r"version 3 cannot be written: .*inference\.vllm\.weights_folder"):
            await control.install(version(3))
        assert not server.controls


async def test_a_server_that_was_restarted_gets_the_version_back(tmp_path):
    async with pair(tmp_path) as (server, control):
        await control.install(version(3))
        keeping = asyncio.create_task(control.keep_installed())
        port = int(server.url.rpartition(":")[2])
        await server.stop()
        again = await ScriptedVllm.start(port=port)
        assert not await control.ready()
        await eventually(lambda: again.weight_version == "run/3" and again._resumed.is_set(), timeout_s=60)
        assert again.tensors["a"].tobytes() == tensors(3)["a"].tobytes()
        keeping.cancel()
        await again.stop()


async def test_recompute_aborts_what_runs(tmp_path):
    async with pair(tmp_path, update="recompute") as (server, control):
        await control.install(version(3))
        assert server.controls[0] == "pause?mode=abort"


@pytest.mark.parametrize("path", ["pause", *PHASES])
@pytest.mark.parametrize("status", [500, 503])
async def test_a_failing_phase_is_tried_again_and_never_serves_torn_weights(tmp_path, path, status):
    async with pair(tmp_path, Script(control_faults={path: [200, status, status]})) as (server, control):
        await control.install(version(3))
        installing = asyncio.create_task(control.install(version(4)))
        while not installing.done():
            # Whoever asks now and is answered must not find weights between two versions.
            assert server.version in (3, 4) or not server._resumed.is_set()
            await asyncio.sleep(0.005)
        await installing
        assert server.weight_version == "run/4" and server.version == 4 and server._resumed.is_set()


async def test_a_refusal_names_the_remedy(tmp_path):
    async with pair(tmp_path, Script(dev_mode=False)) as (_, control):
        with pytest.raises(StartupError, match="VLLM_SERVER_DEV_MODE=1"):
            await control.install(version(3))
    async with pair(tmp_path, Script(control_faults={"update_weights": [400]})) as (_, control):
        with pytest.raises(StartupError, match=r"update_weights answers 400.*400 by the script"):
            await control.install(version(3))


async def test_an_update_that_changes_nothing_is_found_out(tmp_path):
    async with pair(tmp_path, Script(ignores_updates=True)) as (_, control):
        await control.install(version(3))  # the server may have begun with these very weights
        with pytest.raises(StartupError, match="changed no weight"):
            await control.install(version(4))


async def test_equal_weights_under_a_new_number_are_no_suspicion(tmp_path):
    async with pair(tmp_path) as (server, control):
        await control.install(version(3))
        await control.install(version(4, content=3))
        assert server.weight_version == "run/4"
        await control.install(version(5))
        checks = server.controls.count("weight_checker")
        await control.install(version(6))
        assert server.controls.count("weight_checker") == checks  # proven once


async def test_a_server_without_a_checker_is_served_all_the_same(tmp_path, caplog):
    async with pair(tmp_path, Script(has_checker=False)) as (server, control):
        await control.install(version(3))
        await control.install(version(4))
        assert server.weight_version == "run/4"
    assert caplog.text.count("cannot be checked") == 1


async def test_the_process_follows_the_trainer_and_resumes_what_a_dead_one_left_paused(tmp_path):
    trainer = await Trainer("run").start()
    server = await ScriptedVllm.start(weight_version="default")
    port = free_port()
    overrides = {
        "run.id": "run",
        "run.directory": str(tmp_path),
        "trainer.address": trainer.address,
        "inference.dialect": "vllm",
        "inference.vllm.url": server.url,
        "inference.vllm.weights_folder": str(tmp_path / "w"),
    }
    file = tmp_path / "run.yaml"
    file.write_text(config.dump(config.load(ROOT / "configs" / "guess_number.yaml", overrides=overrides)))
    arguments = ["-m", "services.inference", "--config", str(file), "--listen", f"127.0.0.1:{port}", "--name", "e"]
    puller = Process([sys.executable, *arguments], tmp_path / "puller.log")
    try:
        await trainer.publish(3, tensors(3))
        await eventually(lambda: server.weight_version == "run/3", timeout_s=90)
        await trainer.publish(4, tensors(4))
        await eventually(lambda: trainer.watches[-1] == 4, timeout_s=90)
        assert server.weight_version == "run/4"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/ready") as response:
                assert response.status == 200
            async with session.get(f"http://127.0.0.1:{port}/policy_version") as response:
                assert json.loads(await response.read())["policy_version"] == 4
        server.script.control_faults["update_weights"] = [503] * 1000
        await trainer.publish(5, tensors(5))
        await eventually(lambda: len(server.script.control_faults["update_weights"]) < 1000, timeout_s=90)
        puller.kill()
        assert not server._resumed.is_set()
        server.script.control_faults.clear()
        puller.start()
        await eventually(lambda: server.weight_version == "run/5" and server._resumed.is_set(), timeout_s=90)
        puller.terminate()
        await eventually(lambda: not puller.running, timeout_s=60)
        assert puller.wait(1) == 0, puller.output
    finally:
        puller.kill()
        await server.stop()
        await trainer.stop()
