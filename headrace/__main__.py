"""The `headrace` command.

Each command imports what it needs, so that `headrace env` works where only the environments' extra is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from headrace import rpc
from headrace.environment_kit import command as environment_kit
from headrace.errors import StartupError

_DESCRIPTION = """\
Headrace trains LLM agents with reinforcement learning, as services that never wait for each other: a trainer, rollout
gateways, inference engines and environment servers, with Redis between gateways and trainer."""

_RUN_DESCRIPTION = """\
Runs one config on this machine: starts Redis (unless redis.url names one) and every service as a process of its own,
shows progress, starts again what dies, and stops everything when the trainer is done or on Ctrl-C."""

_RUN_EPILOG = """\
examples:
  headrace run configs/guess_number.yaml
  headrace run configs/guess_number.yaml --set trainer.steps=50 --set run.seed=1
  headrace run configs/guess_number.yaml --set run.id=mine      again with the same id: goes on where it stopped

results, in runs/ID/:
  config.yaml     the config that the services read, addresses filled in
  policy/         the final policy, a Hugging Face folder
  metrics.jsonl   one line a step; reward.png draws it, tensorboard/ holds the same
  checkpoints/    what a run with the same id goes on from
  logs/           one file for each process; processes.json tells their pids and metrics addresses

exit codes: 0 done, 1 a service kept failing, 2 something for you to correct (one line each), 130 stopped by a signal"""


def main() -> None:
    """Parses the command line and carries it out."""
    arguments = _parser().parse_args()
    rpc.main(lambda: arguments.command(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    try:
        from headrace import launch
        from headrace.progress import Display
    except ImportError as error:
        raise StartupError(f"`headrace run` needs more than is installed ({error}): install headrace[dev]") from error
    overrides = dict(_override(text) for text in arguments.set)
    # Under nohup a closed terminal must not end the run.
    hung_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    stop = rpc.stop_signal(*hung_up)
    return await launch.launch(arguments.config, overrides, display=Display(sys.stdout), stop=stop)


async def _export(arguments: argparse.Namespace) -> int:
    # The trainer's own program: this package knows no model.
    command = [sys.executable, "-m", "services.trainer.export", *arguments.arguments]
    exporting = await asyncio.create_subprocess_exec(*command)
    return await exporting.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headrace", description=_DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="train: run a config on this machine, every service as its own process",
        description=_RUN_DESCRIPTION,
        epilog=_RUN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("config", type=Path, metavar="CONFIG", help="the run file, for example configs/guess_number.yaml")
    run.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replaces one value of the file, by dotted key; the value is YAML; may be repeated",
    )
    run.set_defaults(command=_run)
    # Everything behind `export` is the trainer's program's: nothing here looks like an option, --help neither.
    export = commands.add_parser(
        "export", help="write a checkpoint's policy as a Hugging Face folder", add_help=False, prefix_chars="\0"
    )
    export.add_argument("arguments", nargs="*")
    export.set_defaults(command=_export)
    environment_kit.add_parsers(commands)
    return parser


def _override(text: str) -> tuple[str, Any]:
    import yaml

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise StartupError(f"--set {text}: write KEY=VALUE, for example --set trainer.steps=50")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise StartupError(f"--set {text}: the value is not YAML; quote it") from error


if __name__ == "__main__":
    main()
