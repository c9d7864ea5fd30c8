"""Checks a deployed run, from a `helm test` pod: every service is healthy; an episode can be played.

    check.py health HOST:PORT…
    check.py episode GATEWAY_HOST:PORT ENVIRONMENT

Exits 0 when it is so within the time limit; otherwise it prints what is not and exits 1.
"""

from __future__ import annotations

import argparse
import sys
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.v1 import rollout_service_pb2, rollout_service_pb2_grpc, trajectory_pb2


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks a deployed run.")
    parser.add_argument("--timeout-s", type=float, default=120.0)
    commands = parser.add_subparsers(dest="command", required=True)
    health = commands.add_parser("health", help="every service answers SERVING")
    health.add_argument("addresses", nargs="+")
    episode = commands.add_parser("episode", help="a gateway plays one episode to its end")
    episode.add_argument("gateway")
    episode.add_argument("environment")
    args = parser.parse_args()
    deadline_s = time.monotonic() + args.timeout_s
    if args.command == "health":
        # All of them, so that one run names every service that ails.
        return max([check_health(address, deadline_s) for address in args.addresses])
    return check_episode(args.gateway, args.environment, args.timeout_s)


def check_health(address: str, deadline_s: float) -> int:
    """0 as soon as the server answers SERVING, 1 at the deadline (a time.monotonic)."""
    answer = "no answer"
    with grpc.insecure_channel(address) as channel:
        while True:
            try:
                reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
                answer = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
            except grpc.RpcError as error:
                answer = f"{error.code().name}: {error.details()}"
            print(f"{address}: {answer}", flush=True)
            if answer == "SERVING":
                return 0
            if time.monotonic() > deadline_s:
                return 1
            time.sleep(2)


def check_episode(gateway: str, environment: str, timeout_s: float) -> int:
    """0 if one episode ends without an error."""
    task = trajectory_pb2.Task(task_id="helm-test", environment=environment, split="train", index=0, seed=0)
    request = rollout_service_pb2.RunEpisodesRequest(tasks=[task], episodes_per_task=1)
    ended = (
        trajectory_pb2.EPISODE_STATUS_COMPLETED,
        trajectory_pb2.EPISODE_STATUS_TRUNCATED_TURNS,
        trajectory_pb2.EPISODE_STATUS_TRUNCATED_TOKENS,
    )
    with grpc.insecure_channel(gateway) as channel:
        stub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        try:
            replies = list(stub.RunEpisodes(request, timeout=timeout_s, wait_for_ready=True))
        except grpc.RpcError as error:
            print(f"{gateway}: {error.code().name}: {error.details()}", flush=True)
            return 1
    for reply in replies:
        status = trajectory_pb2.EpisodeStatus.Name(reply.trajectory.status)
        print(f"{environment}: {status} after {len(reply.trajectory.turns)} turns", flush=True)
    return 0 if replies and all(reply.trajectory.status in ended for reply in replies) else 1


if __name__ == "__main__":
    sys.exit(main())
