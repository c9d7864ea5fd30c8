"""A process that pulls weights and installs them nowhere: `python -m tests.inference.puller --trainer HOST:PORT …`.

It prints a JSON line for each version: its number, the hashes of its tensors as they are in memory, the seconds and
processor seconds that the pull took, and what has been received and has failed since the start.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import resource
from collections import Counter

import uvloop

from headrace import address, rpc, weights
from services.inference import peers
from services.inference.shelf import Shelf
from services.inference.weights import Hold, Puller, Version


class Report:
    """Prints; observes pulls."""

    def __init__(self, hashes: bool) -> None:
        self._hashes = hashes
        self._bytes: Counter[str] = Counter()
        self._causes: list[str] = []
        self._seconds = self._cpu_s = 0.0

    def pulled(self, outcome: str, seconds: float) -> None:
        self._seconds = seconds

    def received(self, sender: str, kind: str, size_bytes: int) -> None:
        self._bytes[f"{sender} {kind}"] += size_bytes

    def fell_back(self, cause: str) -> None:
        self._causes.append(cause)

    async def install(self, version: Version) -> None:
        cpu_s = _cpu_s()
        hashes = []
        if self._hashes:
            hashes = [weights.tensor_hash(weights.tensor_bytes(array)) for array in version.tensors.values()]
        line = {
            "policy_version": version.policy_version,
            "hashes": hashes,
            "seconds": self._seconds,
            "cpu_s": cpu_s - self._cpu_s,
            "bytes": self._bytes,
            "causes": self._causes,
        }
        print(json.dumps(line), flush=True)
        self._cpu_s = _cpu_s()


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def run(options: argparse.Namespace) -> None:
    report, shelf = Report(not options.no_hashes), Shelf()
    async with contextlib.AsyncExitStack() as stack:
        serving_address = ""
        if options.serves:
            bulk_listen = "" if options.no_bulk else "127.0.0.1:0"
            serving_address = await stack.enter_async_context(
                peers.serving(shelf, "127.0.0.1:0", run_id=options.run, bulk_listen=bulk_listen)
            )
        puller = Puller(
            await stack.enter_async_context(rpc.channel(options.trainer)),
            engine=options.name,
            run_id=options.run,
            install=report.install,
            observer=report,
            hold=Hold(),
            shelf=shelf,
            keeps=not options.forgets,
            trainer_host="" if options.no_bulk else address.split(options.trainer)[0],
            serving_address=serving_address,
        )
        await puller.run()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer", required=True)
    parser.add_argument("--run", default="run")
    parser.add_argument("--name", default="engine-0")
    parser.add_argument("--serves", action="store_true", help="serve peers")
    parser.add_argument("--forgets", action="store_true", help="keep nothing")
    parser.add_argument("--no-bulk", action="store_true")
    parser.add_argument("--no-hashes", action="store_true")
    logging.basicConfig(level=logging.INFO)
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
