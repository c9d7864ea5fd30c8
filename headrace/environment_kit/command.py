"""The command `headrace env`: check, play and bench a server of environments."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from typing import Any

from headrace import security_arguments
from headrace.environment_kit import bench, check, play
from headrace.environment_kit.check import Result
from headrace.environment_kit.rules import Settings
from headrace.errors import StartupError

_CHECK_EPILOG = f"""\
rules: {", ".join(check.NAMES)}

exit codes: 0 every rule that was checked is kept, 1 one is broken, 2 the server could not be checked"""


def add_parsers(commands: Any) -> None:
    """Adds `env` and its commands to the `headrace` command's parsers; each sets `command`, a coroutine function."""
    env = commands.add_parser("env", help="check, play or measure an environment server, in whatever language it is")
    kinds = env.add_subparsers(required=True, metavar="COMMAND")

    checker = kinds.add_parser(
        "check",
        help="checks rule by rule that a server keeps the contract",
        description="Checks rule by rule that a server keeps the contract, and shows the requests where it does not.",
        epilog=_CHECK_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_common(checker)
    _add_actions(checker)
    checker.add_argument("--capacity", metavar="N", type=int, help="episodes that the server takes (found out)")
    checker.add_argument("--parallel", metavar="N", type=int, default=500, help="episodes at once (%(default)s)")
    checker.add_argument("--slow", action="store_true", help="also check what takes two minutes")
    checker.add_argument("--slow-action", metavar="TEXT", help="with --slow: a reply that makes a step that long")
    checker.add_argument("--slow-s", metavar="S", type=float, default=120.0, help="how long that is (%(default)s)")
    checker.add_argument("--rule", action="append", choices=check.NAMES, metavar="RULE", help="only these; repeatable")
    checker.add_argument("--skip", action="append", choices=check.NAMES, metavar="RULE", default=[], help="not these")
    checker.set_defaults(command=_check)

    player = kinds.add_parser(
        "play",
        help="plays an episode in the terminal, you in the policy's place",
        description=(play.__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_common(player)
    player.add_argument("--split", metavar="NAME", help="split of the tasks (train)")
    player.add_argument("--index", metavar="N", type=int, default=0, help="which task of the split (%(default)s)")
    player.add_argument("--seed", metavar="N", type=int, default=0, help="the task's seed (%(default)s)")
    player.set_defaults(command=_play)

    bencher = kinds.add_parser("bench", help="measures steps a second, and p50 and p99 of their times")
    _add_common(bencher)
    _add_actions(bencher)
    bencher.add_argument("--parallel", metavar="N", type=int, default=64, help="episodes at once (%(default)s)")
    bencher.add_argument("--seconds", metavar="S", type=float, default=10.0, help="for how long (%(default)s)")
    bencher.set_defaults(command=_bench)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="HOST:PORT", help="the server")
    parser.add_argument("--environment", metavar="NAME", help="one of those that it offers")
    security_arguments.add(parser, serves=False)


def _add_actions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--action", metavar="TEXT", action="append", help="a reply of the policy; repeated: taken in turn (1, yes, a)"
    )
    parser.add_argument("--timeout-s", metavar="S", type=float, default=60.0, help="for each response (%(default)s)")
    parser.add_argument("--json", action="store_true", help="write JSON, one object a line")


async def _check(arguments: argparse.Namespace) -> int:
    if arguments.parallel < 1 or (arguments.capacity is not None and arguments.capacity < 1):
        raise StartupError("--parallel and --capacity must be at least 1")
    settings = Settings(
        actions=arguments.action or Settings.actions,
        timeout_s=arguments.timeout_s,
        capacity=arguments.capacity,
        parallel=arguments.parallel,
        slow=arguments.slow,
        slow_action=arguments.slow_action,
        slow_s=arguments.slow_s,
    )
    only = set(arguments.rule or check.NAMES) - set(arguments.skip)
    results = []
    shown = None
    findings = check.check(
        arguments.address,
        settings,
        environment=arguments.environment,
        only=only,
        security=security_arguments.read(arguments, serves=False),
    )
    async for finding in findings:
        results.append(finding.result)
        if arguments.json:
            print(json.dumps(dataclasses.asdict(finding), ensure_ascii=False), flush=True)
            continue
        if finding.environment != shown:
            shown = finding.environment
            print(f"{arguments.address}  {shown}", flush=True)
        print(check.report(finding), flush=True)
    if not arguments.json:
        print(", ".join(f"{results.count(result)} {result}" for result in Result if result in results))
    return 1 if Result.BROKEN in results else 0


async def _play(arguments: argparse.Namespace) -> int:
    security = security_arguments.read(arguments, serves=False)
    info = await play.offered(arguments.address, arguments.environment, security)
    # What follows blocks the loop, which would otherwise keep Ctrl-C to itself.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return play.play(
        arguments.address,
        info,
        sys.stdin,
        sys.stdout,
        split=arguments.split,
        index=arguments.index,
        seed=arguments.seed,
        security=security,
    )


async def _bench(arguments: argparse.Namespace) -> int:
    if arguments.parallel < 1 or arguments.seconds <= 0:
        raise StartupError("--parallel must be at least 1, --seconds above 0")
    settings = Settings(
        actions=arguments.action or Settings.actions, timeout_s=arguments.timeout_s, parallel=arguments.parallel
    )
    measured = await bench.bench(
        arguments.address,
        settings,
        environment=arguments.environment,
        seconds=arguments.seconds,
        security=security_arguments.read(arguments, serves=False),
    )
    print(json.dumps(dataclasses.asdict(measured)) if arguments.json else bench.report(measured))
    return 1 if measured.failures else 0
