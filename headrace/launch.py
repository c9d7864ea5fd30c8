"""Runs a config on this machine: Redis and every service as processes of their own, until the trainer is done.

In goes a run file, out come the run's folder (resolved config, logs, metrics, plot, policy) and an exit code. `launch`
waits for three things at once: the trainer's end, the end of any other process that starting again does not mend and
whose work no other does, and a signal. Whichever comes first, everything is stopped in the order in which nothing is
lost: the trainer, the gateways, those whom they called, Redis.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace import config as run_config
from headrace import local_run, model_folder, plot, progress, redis_server, security, step_log, summary
from headrace.errors import StartupError
from headrace.local_run import LocalRun
from headrace.process import USER_ERROR, Process, describe
from headrace.progress import Display

FAILED = 1
INTERRUPTED = 130


async def launch(path: Path, overrides: Mapping[str, Any], *, display: Display, stop: asyncio.Event) -> int:
    """Runs the config to its end.

    Args:
        path: the run file.
        overrides: values that replace the file's, by dotted key.
        display: where people read how it goes.
        stop: ends the run early when it is set.

    Returns:
        0 when the trainer ended by itself, FAILED when a service kept failing, INTERRUPTED when `stop` was set.

    Raises:
        StartupError: a user's error, found here or by a service, alone or in a group; nothing is left running.
    """
    began = time.monotonic()
    config = run_config.named_run(run_config.load(path, overrides=dict(overrides)), path.stem)
    run = local_run.plan(config)
    with local_run.exclusive(run):
        model_folder.ensure(run.config)
        local_run.write(run)
        display.say(f"run {config.run.id}: {run.folder}")

        fleet: dict[str, Process] = {}
        for command in run.commands:
            fleet[command.name] = Process(command, report=display.say, started=lambda: _write_processes(run, fleet))
        try:
            code = await _supervise(run, fleet, display=display, stop=stop)
        finally:
            display.end_status()
        restarts = sum(process.restarts for process in fleet.values())
        _close(run, display, wall_s=time.monotonic() - began, restarts=restarts)
    return code


async def _supervise(run: LocalRun, fleet: Mapping[str, Process], *, display: Display, stop: asyncio.Event) -> int:
    async with asyncio.TaskGroup() as tasks:
        try:
            running = {}
            if run.redis:
                running[tasks.create_task(fleet["redis"].keep_running())] = fleet["redis"]
            await _wait_for_redis(run)
            for command in run.services:
                running[tasks.create_task(fleet[command.name].keep_running())] = fleet[command.name]
            shown = tasks.create_task(
                progress.follow(
                    display,
                    trainer_address=run.config.trainer.address,
                    metrics=run.folder / step_log.NAME,
                    total_steps=run.config.trainer.steps,
                    security=security.read(run.config.security.tls, run.config.security.token_file),
                )
            )
            stopped = tasks.create_task(stop.wait())
            ended = await _wait_for_end(run, running, stopped, display)
            shown.cancel()
            stopped.cancel()
            if not ended:
                display.say("stopping")
                return INTERRUPTED
            return _judge(ended, display)
        finally:
            for stage in run.stages:
                await asyncio.gather(*(fleet[command.name].stop() for command in stage))
    raise AssertionError("the body returns or raises")


async def _wait_for_end(
    run: LocalRun, running: dict[asyncio.Task[int], Process], stopped: asyncio.Task[Any], display: Display
) -> list[tuple[Process, int]]:
    """The processes that ended for good and that the run cannot do without; none when `stopped` was first.

    One of several engines or gateways that cannot be kept up is left behind: the others do its work.
    """
    while True:
        ended, _ = await asyncio.wait({*running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if stopped in ended:
            return []
        results = [(running.pop(task), task.result()) for task in ended if task in running]
        needed = []
        for process, code in results:
            others = _stand_ins(run, process, running.values())
            if code == USER_ERROR or not others:
                needed.append((process, code))
            else:
                display.say(
                    f"{process.command.name} {describe(code)} again and again; {process.command.log} says why;"
                    f" going on with {', '.join(others)}"
                )
        if needed:
            return needed


def _stand_ins(run: LocalRun, process: Process, running: Iterable[Process]) -> list[str]:
    """Who does the process's work when it is gone."""
    kind = next((kind for kind in (run.engines, run.gateways) if process.command in kind), ())
    return [other.command.name for other in running if other.command in kind]


async def _wait_for_redis(run: LocalRun) -> None:
    try:
        await redis_server.wait_until_ready(run.config.redis.url, timeout_s=run.config.redis.timeout_s)
    except StartupError as error:
        if run.redis is None:
            raise
        raise StartupError(f"the Redis server did not start; {run.redis.log} says why") from error


def _judge(ended: list[tuple[Process, int]], display: Display) -> int:
    """The run's exit code from the processes that ended for good. Raises StartupError for what they call a user's."""
    errors: dict[str, str] = {}  # several services may stumble over the same thing: say it once
    for process, code in ended:
        if code == USER_ERROR:
            for line in process.errors():
                errors.setdefault(line, f"{process.command.name}: {line}")
    if errors:
        raise StartupError("\n".join(errors.values()))
    failures = [(process.command, code) for process, code in ended if not (code == 0 and process.command.ends)]
    for command, code in failures:
        display.say(f"{command.name} {describe(code)} again and again; {command.log} says why")
    return FAILED if failures else 0


def _close(run: LocalRun, display: Display, *, wall_s: float, restarts: int) -> None:
    steps = step_log.read(run.folder / step_log.NAME)
    picture = run.folder / "reward.png"
    if steps:
        plot.draw(
            steps,
            picture,
            title=run.config.run.id,
            ceiling=run.config.telemetry.plot_ceiling,
            ceiling_label=run.config.telemetry.plot_ceiling_label,
        )
    results = {
        "policy": run.folder / "policy",
        "plot": picture,
        "metrics": run.folder / step_log.NAME,
        "checkpoint": run.folder / "checkpoints",
        "logs": run.folder / "logs",
    }
    for line in summary.lines(steps, wall_s=wall_s, restarts=restarts, results=results):
        display.say(line)


def _write_processes(run: LocalRun, fleet: Mapping[str, Process]) -> None:
    """Tells, in the run's folder, which process is which: for those who watch or disturb a run."""
    entries = [
        {
            "name": name,
            "pid": process.pid,
            "restarts": process.restarts,
            "metrics": run.metrics_addresses.get(name, ""),
            "command": " ".join(process.command.arguments),
        }
        for name, process in fleet.items()
    ]
    draft = run.folder / "processes.json.draft"
    draft.write_text(json.dumps(entries, indent=1) + "\n")
    draft.replace(run.folder / "processes.json")
