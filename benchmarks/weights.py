"""What moving weights costs: `python -m benchmarks.weights`.

1. A full pull of 0.5 GB through GetWeights and the engine's puller, checked tensor by tensor, beside bare TCP sockets
   in the same run: the limit. Also with the bytes over gRPC.
2. The bytes of exact differences between consecutive RL steps of SmolLM2-135M in bfloat16, made by the trainer's own
   learner at three learning rates, and how fast they are encoded and decoded.
3. What the trainer sends when 1, 4 and 8 engines pull a full version and then a difference, with peers and without.

Every process gets the settings of malloc that `headrace run` gives to trainer and engines.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks import results, rl_steps
from benchmarks.results import Figure
from headrace import delta
from headrace.local_run import KEEP_FREED_MEMORY
from headrace.v1 import trainer_service_pb2 as pb
from services.trainer.difference import difference
from services.trainer.snapshot import Snapshot, take_snapshot
from tests.inference import fleet
from tests.processes import ROOT

Tensors = list[tuple[str, np.ndarray]]

MODEL = ROOT / ".cache" / "smollm2-135m-instruct"
LEARNING_RATES = (1e-6, 3e-6, 1e-5)
TENSORS, TENSOR_BYTES = 64, 8 * 1024 * 1024


def main() -> None:
    """Measures, prints the tables, writes results/weights.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--pulls", type=int, default=8, help="pulls of each kind, of which the best counts")
    parser.add_argument("--steps", type=int, default=3, help="RL steps at each learning rate, of which the last count")
    parser.add_argument("--model", type=Path, default=MODEL, help="Hugging Face folder with weights (%(default)s)")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--only", choices=["pull", "delta", "fanout"], help="measure one of the three")
    options = parser.parse_args()
    if KEEP_FREED_MEMORY.items() - os.environ.items():
        command = [sys.executable, "-m", "benchmarks.weights", *sys.argv[1:]]  # glibc reads them when a process starts
        os.execvpe(sys.executable, command, {**os.environ, **KEEP_FREED_MEMORY})

    figures: list[Figure] = []
    if options.only in (None, "pull"):
        figures += pull_figures(options.pulls)
    if options.only in (None, "delta"):
        if not (options.model / "model.safetensors").exists():
            sys.exit(f"error: {options.model} holds no model; `make demo-smollm2` makes one")
        figures += delta_figures(options.model, options.steps)
    if options.only in (None, "fanout"):
        figures += fanout_figures(options.replicas)
    print(f"load average {os.getloadavg()[0]:.1f}")
    print(results.write("weights", figures))


@dataclass(frozen=True)
class Pull:
    """The best of several pulls of one kind."""

    bytes_per_s: float
    cpu_s: float  # of both ends


def pull_figures(pulls: int) -> list[Figure]:
    """Part 1."""
    array = np.random.default_rng(0).integers(0, 2**16, TENSOR_BYTES // 2, dtype=np.uint16).view(ml_dtypes.bfloat16)
    snapshot = take_snapshot(1, [(f"tensor.{index:02}", np.roll(array, index)) for index in range(TENSORS)])
    tcp, ours, grpc = [], [], []
    for _ in range(2):  # in turns, since the machine may be busier at one time than at another
        tcp.append(measure_tcp(snapshot.data, pulls // 2))
        ours.append(asyncio.run(measure_pull(snapshot, pulls // 2)))
        grpc.append(asyncio.run(measure_pull(snapshot, pulls // 2, "--no-bulk")))
    rows = [
        ("bare TCP", _best(tcp)),
        ("GetWeights, bulk port", _best(ours)),
        ("GetWeights, all over gRPC", _best(grpc)),
    ]
    limit = rows[0][1]
    print(
        results.table(
            (f"{TENSORS * TENSOR_BYTES >> 20} MiB full", "MB/s", "of TCP", "CPU s", "of TCP"),
            [
                (
                    name,
                    f"{pull.bytes_per_s / 1e6:.0f}",
                    f"{pull.bytes_per_s / limit.bytes_per_s:.2f}",
                    f"{pull.cpu_s:.3f}",
                    f"{pull.cpu_s / limit.cpu_s:.2f}",
                )
                for name, pull in rows
            ],
        ),
        flush=True,
    )
    return [
        figure
        for name, pull in (("bulk", rows[1][1]), ("grpc", rows[2][1]))
        for figure in (
            Figure(f"weights_pull_{name}", pull.bytes_per_s / 1e6, None, limit.bytes_per_s / 1e6, "MB/s"),
            Figure(f"weights_pull_{name}_cpu", pull.cpu_s, None, limit.cpu_s, "s"),
        )
    ]


async def measure_pull(snapshot: Snapshot, pulls: int, *arguments: str) -> Pull:
    """The snapshot as so many versions, each pulled whole by an engine's puller. The first, into fresh memory, counts
    as little as a socket's first bytes."""
    measured = []
    async with (
        fleet.trainer(delta_bases=0) as trainer,
        fleet.pullers(trainer.address, ["--no-hashes", *arguments]) as (puller,),
    ):
        for version in range(1, pulls + 3):
            await fleet.all_watch(trainer, 1, held=version - 1)
            cpu_s = _cpu_s()
            trainer.store.publish(_renumbered(snapshot, version))
            report = await puller.report(version)
            measured.append(Pull(snapshot.size_bytes / report["seconds"], _cpu_s() - cpu_s + report["cpu_s"]))
    return _best(measured[2:])


def measure_tcp(tensors: Sequence[memoryview], pulls: int) -> Pull:
    """The same bytes through a socket, into memory that is there already."""
    size = sum(map(len, tensors))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = ["-m", "benchmarks.tcp_receiver", str(listener.getsockname()[1]), str(size), str(pulls)]
        with subprocess.Popen([sys.executable, *receiver], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            connection, _ = listener.accept()
            assert process.stdout
            measured = []
            with connection:
                while connection.recv(1):
                    cpu_s = _cpu_s()
                    for tensor in tensors:
                        connection.sendall(tensor)
                    cpu_s = _cpu_s() - cpu_s
                    line = json.loads(process.stdout.readline())
                    measured.append(Pull(size / line["seconds"], cpu_s + line["cpu_s"]))
    return _best(measured)


@dataclass(frozen=True)
class Difference:
    """Of one RL step's weights to those before it."""

    changed_fraction: float  # of elements
    size_fraction: float  # of the full version's bytes
    encode_bytes_per_s: float  # of the full version
    decode_bytes_per_s: float


def delta_figures(folder: Path, steps: int) -> list[Figure]:
    """Part 2."""
    measured = {}
    for rate in LEARNING_RATES:
        print(f"{steps} steps of {folder.name} at {rate:g}", file=sys.stderr)
        versions = itertools.pairwise(rl_steps.snapshots(folder, learning_rate=rate, steps=steps, dtype="bfloat16"))
        differences = [measure_delta(old, new) for old, new in itertools.islice(versions, steps // 2, None)]
        measured[rate] = Difference(
            *(statistics.mean(getattr(each, field.name) for each in differences) for field in fields(Difference))
        )
    print(
        results.table(
            (f"{folder.name}, bfloat16", "elements changed", "bytes", "encode MB/s", "decode MB/s"),
            [
                (
                    f"learning rate {rate:g}",
                    f"{each.changed_fraction:.2%}",
                    f"{each.size_fraction:.2%}",
                    f"{each.encode_bytes_per_s / 1e6:.0f}",
                    f"{each.decode_bytes_per_s / 1e6:.0f}",
                )
                for rate, each in measured.items()
            ],
        ),
        flush=True,
    )
    return [
        figure
        for rate, each in measured.items()
        for figure in (
            Figure(f"weights_delta_bytes_{rate:g}", each.size_fraction, None, None, "1"),
            Figure(f"weights_delta_changed_{rate:g}", each.changed_fraction, None, None, "1"),
            Figure(f"weights_delta_encode_{rate:g}", each.encode_bytes_per_s / 1e6, None, None, "MB/s"),
            Figure(f"weights_delta_decode_{rate:g}", each.decode_bytes_per_s / 1e6, None, None, "MB/s"),
        )
    ]


def measure_delta(old: Tensors, new: Tensors) -> Difference:
    """Encodes and decodes with one thread, tensor by tensor."""
    changed = elements = size = full = 0
    encode_s = decode_s = 0.0
    for (_, before), (_, after) in zip(old, new, strict=True):
        words = [array.reshape(-1).view(np.uint16) for array in (before, after)]
        changed, elements = changed + int((words[0] != words[1]).sum()), elements + after.size
        base, result = (word.view(np.uint8) for word in words)
        start_s = time.perf_counter()
        encoded = delta.encode(result, base, word_bytes=2)
        encode_s += time.perf_counter() - start_s
        full += result.size
        size += result.size if encoded is None else len(encoded)
        if encoded is not None:
            start_s = time.perf_counter()
            decoded = delta.decode(encoded, base, word_bytes=2)
            decode_s += time.perf_counter() - start_s
            assert np.array_equal(decoded, result)
    return Difference(changed / elements, size / full, full / encode_s, full / decode_s)


@dataclass(frozen=True)
class Egress:
    """What a trainer sent, in copies of what one engine needs, and until when the last engine had it."""

    full_copies: float
    full_s: float
    delta_copies: float
    delta_s: float


def fanout_figures(replicas: Sequence[int]) -> list[Figure]:
    """Part 3."""
    old, new = ({name: array for name, array in _fanout_tensors(step)} for step in (0, 1))
    snapshots = take_snapshot(1, old.items()), take_snapshot(2, new.items())
    measured = {
        (count, peers): asyncio.run(measure_fanout(snapshots, count, peers))
        for count in replicas
        for peers in (False, True)
    }
    print(
        results.table(
            (
                f"{snapshots[0].size_bytes >> 20} MiB, what the trainer sends",
                "full, copies",
                "all have it after s",
                "difference, copies",
                "all have it after s",
            ),
            [
                (
                    f"{count} engines{', peers serve' if peers else ''}",
                    f"{each.full_copies:.2f}",
                    f"{each.full_s:.2f}",
                    f"{each.delta_copies:.2f}",
                    f"{each.delta_s:.2f}",
                )
                for (count, peers), each in measured.items()
            ],
        ),
        flush=True,
    )
    return [
        figure
        for count in replicas
        for figure in (
            Figure(
                f"weights_egress_full_{count}",
                measured[count, True].full_copies,
                measured[count, False].full_copies,
                1.0,
                "copies",
            ),
            Figure(
                f"weights_egress_delta_{count}",
                measured[count, True].delta_copies,
                measured[count, False].delta_copies,
                1.0,
                "copies",
            ),
        )
    ]


async def measure_fanout(snapshots: tuple[Snapshot, Snapshot], count: int, peers: bool) -> Egress:
    """So many engines pull the first snapshot whole, then the difference to the second."""
    arguments = [["--no-hashes", *(["--serves"] if peers else [])] for _ in range(count)]
    copies, seconds = [], []
    async with fleet.trainer() as trainer, fleet.pullers(trainer.address, *arguments) as engines:
        for number, snapshot in enumerate(snapshots):
            await fleet.all_watch(trainer, count, held=number)
            trainer.engines.sent_bytes.clear()
            start_s = time.perf_counter()
            trainer.store.publish(snapshot)
            await asyncio.gather(*(engine.report(number + 1) for engine in engines))
            seconds.append(time.perf_counter() - start_s)
            one = snapshot.size_bytes if number == 0 else difference(snapshots[1], snapshots[0]).size_bytes
            copies.append(trainer.engines.sent_bytes.total() / one)
    return Egress(copies[0], seconds[0], copies[1], seconds[1])


def _fanout_tensors(step: int) -> Iterator[tuple[str, np.ndarray]]:
    """128 MiB in bfloat16, of which a step changes about a hundredth."""
    for index in range(32):
        random = np.random.default_rng(index)
        words = random.integers(0, 2**16, 2 * 1024 * 1024, dtype=np.uint16)
        words[:: 100 + index] ^= step
        yield f"tensor.{index:02}", words.view(ml_dtypes.bfloat16)


def _renumbered(snapshot: Snapshot, version: int) -> Snapshot:
    manifest = pb.WeightManifest()
    manifest.CopyFrom(snapshot.manifest)
    manifest.policy_version = version
    return Snapshot(manifest, snapshot.data)


def _best(pulls: Sequence[Pull]) -> Pull:
    return Pull(max(pull.bytes_per_s for pull in pulls), min(pull.cpu_s for pull in pulls))


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
