"""The trainer's process: `python -m services.trainer --config RUN.yaml --listen HOST:PORT --metrics-listen HOST:PORT`.

Constructs and wires; what happens is in loop.py. Order at start: the config and the model folder are checked, the port
is taken (health: NOT_SERVING), Redis is waited for, the model is built or restored, the first version is published
(health: SERVING), and the loop runs.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass

import prometheus_client
from redis.exceptions import AuthenticationError, NoPermissionError

from headrace import config as configs
from headrace import model_folder, rpc, security, step_log, stream, telemetry, tracing
from headrace.bulk import BulkServer
from headrace.config import Config, ConfigError
from headrace.errors import StartupError
from headrace.v1 import trainer_service_pb2 as pb
from headrace.v1 import trainer_service_pb2_grpc
from services.trainer.batcher import Batcher
from services.trainer.build import Model, build
from services.trainer.commit import Committer
from services.trainer.compute import ComputeThread
from services.trainer.evaluation import Evaluator
from services.trainer.exposition import StatusCollector
from services.trainer.feeder import Feeder
from services.trainer.inbox import Inbox
from services.trainer.insist import insist
from services.trainer.journal import Journal
from services.trainer.ledger import Ledger
from services.trainer.lineage import Lineage
from services.trainer.loop import Interrupted, Loop
from services.trainer.model import huggingface
from services.trainer.publisher import Publisher
from services.trainer.report import Reporter
from services.trainer.returns import Returns
from services.trainer.server import SERVICE, Engines, TrainerServicer
from services.trainer.status import Status
from services.trainer.task_order import TaskOrder, TaskSource
from services.trainer.train import Learner
from services.trainer.verdict import Rules
from services.trainer.warm_start import Collector, warm_start
from services.trainer.weights import WeightStore

log = logging.getLogger(__name__)

_STOP_S = 30.0
_LAST_PULL_S = 10.0


@dataclass(frozen=True)
class _Process:
    """What exists before there is a model."""

    config: Config
    streams: stream.Streams
    store: WeightStore
    ledger: Ledger
    status: Status
    server: rpc.Server
    compute: ComputeThread
    stop: asyncio.Event


async def run(arguments: argparse.Namespace) -> None:
    """Trains to the end of the run, or until a signal."""
    config = configs.load(arguments.config)
    telemetry.configure("trainer", level=config.telemetry.log_level, log_format=config.telemetry.log_format)
    folder = model_folder.ensure(_checked(config))
    tracing.configure("trainer", instance="trainer", run_id=config.run.id, **config.telemetry.traces.model_dump())
    stop = rpc.stop_signal()
    status = Status(config.run.id, config.trainer.steps)
    store = WeightStore(kept_versions=config.trainer.kept_versions, delta_bases=config.trainer.delta_bases)
    engines, secured = Engines(), security.read(config.security.tls, config.security.token_file)
    bulk = BulkServer.start(arguments.bulk_listen) if arguments.bulk_listen and secured.tls is None else None
    ledger = Ledger(Journal(config.run.path / "consumed.jsonl"))
    servicer = TrainerServicer(store, status, engines, bulk=bulk)
    add = trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server
    server = await rpc.Server.start(
        arguments.listen,
        [rpc.Service(SERVICE, add, servicer)],
        security=secured,
        health_listen=arguments.health_listen,
    )
    try:
        prometheus_client.REGISTRY.register(StatusCollector(status, ledger, engines))
        telemetry.serve_metrics(arguments.metrics_listen)
        streams, compute = await _open_streams(config), ComputeThread()
        model = await compute(build, config, folder)
        process = _Process(config, streams, store, ledger, status, server, compute, stop)
        await _within(_STOP_S, stop, _train(process, model))
        if status.phase == pb.TRAINER_PHASE_FINISHED:
            await (stop.wait() if arguments.stay else _last_pull(engines, status))
    except Interrupted:
        log.warning("stopped within a step; the run goes on from its last checkpoint")
    finally:
        store.close()
        await server.stop(1)
        if bulk:
            await bulk.stop()


async def _train(process: _Process, model: Model) -> None:
    """Takes the run up where its checkpoint left it, publishes, warms up if it is new, and loops."""
    config, streams, ledger, status = process.config, process.streams, process.ledger, process.status
    settings, policy, notes = config.trainer, model.policy, model.notes
    if notes:
        status.step, status.trained_groups = notes.step, notes.trained_groups
    lineage, inbox = Lineage(notes.positions if notes else None), Inbox(streams)
    await inbox.acknowledge(notes.learned_ids if notes else [])
    Journal(config.run.path / "consumed.jsonl").forget_after(status.step)
    metrics = Journal(config.run.path / step_log.NAME)
    metrics.forget_after(status.step)

    sources = {
        name: TaskSource(environment.split, environment.weight, environment.task_count)
        for name, environment in config.environments.items()
    }
    feeder = Feeder(
        streams,
        TaskOrder(sources, seed=config.run.seed),
        ledger,
        lineage,
        status,
        groups_per_step=settings.groups_per_step,
        max_staleness=settings.max_staleness,
    )
    await feeder.open(at_least=notes.cursor if notes else 0)
    returns = Returns(Journal(config.run.path / "returned.jsonl"), status, environments=set(sources))
    publisher = Publisher(
        streams,
        process.store,
        lineage,
        status,
        process.compute,
        dtype=settings.publish_dtype,
        announce=lambda: process.server.set_serving(True),
        journal=Journal(config.run.path / "versions.jsonl"),
    )
    rules = Rules(
        run_id=config.run.id,
        vocabulary_size=model.config.vocab_size,
        environments=frozenset(config.environments),
        max_row_tokens=settings.max_row_tokens,
        max_staleness=settings.max_staleness,
        truncated=settings.loss.truncated,
        truncation_penalty=settings.loss.truncation_penalty,
        stale=settings.stale,
        overlong_limit=config.rollout.max_episode_tokens,
        overlong_buffer=settings.advantage.overlong_buffer,
        overlong_penalty=settings.advantage.overlong_penalty,
        degenerate_returns=settings.dynamic_sampling * settings.groups_per_step,
    )
    committer = Committer(
        checkpoints=model.checkpoints,
        policy=policy,
        inbox=inbox,
        feeder=feeder,
        ledger=ledger,
        lineage=lineage,
        status=status,
        compute=process.compute,
        settings=settings.checkpoint,
    )
    await publisher.publish(policy.state.parameters, updated=False)
    if settings.warm_start and not notes:
        name = settings.warm_start.environment
        collector = Collector(
            inbox=inbox,
            feeder=feeder,
            order=TaskOrder({name: sources[name]}, seed=config.run.seed),
            lineage=lineage,
            returns=returns,
            rules=rules,
        )
        await _warm_up(process, model, settings.warm_start, collector, publisher)
        await committer.commit()
        await committer.settle()
    reporter = Reporter(
        metrics,
        tensorboard=config.run.path / "tensorboard" if config.telemetry.tensorboard else None,
        first_step=status.step + 1,
    )
    evaluator = None
    if settings.evaluation:
        evaluations = Journal(config.run.path / "evaluation.jsonl")
        evaluations.forget_after(status.step)
        evaluator = Evaluator(
            settings.evaluation,
            environments=settings.evaluation.environments or sorted(sources),
            feeder=feeder,
            journal=evaluations,
            status=status,
            seed=config.run.seed,
        )
    loop = Loop(
        settings,
        policy=policy,
        feeder=feeder,
        batcher=Batcher(inbox, feeder, lineage, returns, rules, evaluator=evaluator),
        evaluator=evaluator,
        ledger=ledger,
        publisher=publisher,
        committer=committer,
        reporter=reporter,
        status=status,
        compute=process.compute,
        recent_rewards=[entry["reward_mean"] for entry in metrics.read()],
    )
    await loop.run(process.stop)
    reporter.close()
    if loop.finished:
        await process.compute(
            huggingface.save_folder, config.run.path / "policy", policy.state.parameters, source=model.folder
        )
        status.phase = pb.TRAINER_PHASE_FINISHED
        log.info("finished after %d steps; the policy is in %s", status.step, config.run.path / "policy")


async def _warm_up(
    process: _Process, model: Model, settings: configs.WarmStart, collector: Collector, publisher: Publisher
) -> None:
    """Lets the policy begin reinforcement learning from what imitation made of it."""
    config, compute = process.config, process.compute
    imitator = await compute(
        Learner,
        model.config,
        model.mesh,
        optimizer=configs.Optimizer(learning_rate=settings.learning_rate),
        steps=settings.max_updates,
        loss=config.trainer.loss,
        compute_dtype=config.trainer.compute_dtype,
    )
    state = await warm_start(
        settings,
        collector,
        learner=imitator,
        state=await compute(imitator.initial_state, model.policy.state.parameters),
        publisher=publisher,
        compute=compute,
        group_size=config.rollout.group_size,
        max_row_tokens=config.trainer.max_row_tokens,
        buckets=model.buckets,
        seed=config.run.seed,
        stop=process.stop,
    )
    await compute(model.policy.restart, await compute(model.learner.initial_state, state.parameters))


def _checked(config: Config) -> Config:
    """Raises ConfigError for what only a running service needs."""
    errors = []
    if not config.run.id:
        errors.append("run.id: missing; every service of a run needs the same one")
    if not config.redis.url:
        errors.append("redis.url: missing; give redis://HOST:PORT/0, or let `headrace run` start a server")
    if errors:
        raise ConfigError("config", errors)
    return config


async def _open_streams(config: Config) -> stream.Streams:
    """The run's streams, once Redis answers. Raises StartupError when it does not within redis.timeout_s."""
    timeout_s = config.redis.timeout_s
    try:
        client = stream.connect(config.redis.url, timeout_s=timeout_s)
    except ValueError as error:
        raise ConfigError("config", [f"redis.url: {error}; give redis://HOST:PORT/0"]) from error
    streams = stream.Streams(client, config.run.id, claim_timeout_s=config.rollout.claim_timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            await insist(streams.open)
    except TimeoutError as error:
        raise StartupError(
            f"redis.url: no Redis answered at {config.redis.place} within {timeout_s:g} s; start one or correct the url"
        ) from error
    except (AuthenticationError, NoPermissionError) as error:
        raise StartupError(
            f"redis.url: the server at {config.redis.place} refuses us ({error}); correct user and password"
        ) from error
    return streams


async def _within(seconds: float, stop: asyncio.Event, work: Coroutine[None, None, None]) -> None:
    """Runs `work` to its end, but not longer than so many seconds after `stop`."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    done, _ = await asyncio.wait({working}, timeout=seconds)
    if not done:
        log.warning("gave up after %.0f s; the run goes on from its last checkpoint", seconds)
        working.cancel()
        await asyncio.wait({working})
    else:
        await working


async def _last_pull(engines: Engines, status: Status) -> None:
    """Leaves engines a while to take the last version."""
    try:
        async with asyncio.timeout(_LAST_PULL_S):
            await engines.all_hold(status.policy_version)
    except TimeoutError:
        log.warning("not every engine took the last version: they hold %s", engines.versions)


def main() -> None:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer", description="The learner: feeds tasks, trains on groups, publishes weights."
    )
    parser.add_argument("--config", required=True, metavar="RUN.yaml", help="the run's file, the same for all services")
    parser.add_argument("--listen", default="0.0.0.0:7000", metavar="HOST:PORT", help="gRPC; default %(default)s")
    parser.add_argument(
        "--metrics-listen", default="0.0.0.0:7001", metavar="HOST:PORT", help="Prometheus; default %(default)s"
    )
    parser.add_argument(
        "--bulk-listen",
        default="",
        metavar="HOST:PORT",
        help="where to send the bytes of weights over plain TCP, beside gRPC; unused under security.tls (nowhere)",
    )
    parser.add_argument("--health-listen", default="", metavar="HOST:PORT", help=rpc.HEALTH_LISTEN_HELP)
    parser.add_argument(
        "--stay", action="store_true", help="when the run has ended, serve its last weights until SIGTERM; do not exit"
    )
    arguments = parser.parse_args()
    rpc.main(lambda: run(arguments))


if __name__ == "__main__":
    main()
