"""Checks a deployed run, from a `helm test` pod: every service is healthy; an episode can be played.

    check.py health HOST:PORT…
    check.py episode GATEWAY_HOST:PORT ENVIRONMENT

Over TLS with --authority, --certificate and --key; with the token of --token-file where one is asked for.
Exits 0 when it is so within the time limit; otherwise it prints what is not and exits 1.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.v1 import rollout_service_pb2, rollout_service_pb2_grpc, trajectory_pb2


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks a deployed run.")
    parser.add_argument("--timeout-s", type=float, default=120.0)
    # After the command, too: the chart appends them.
    secured = argparse.ArgumentParser(add_help=False)
    secured.add_argument("--authority", type=pathlib.Path, help="PEM file; without it: plaintext")
    secured.add_argument("--certificate", type=pathlib.Path, help="PEM file")
    secured.add_argument("--key", type=pathlib.Path, help="PEM file")
    secured.add_argument("--token-file", type=pathlib.Path)
    commands = parser.add_subparsers(dest="command", required=True)
    health = commands.add_parser("health", parents=[secured], help="every service answers SERVING")
    health.add_argument("addresses", nargs="+")
    episode = commands.add_parser("episode", parents=[secured], help="a gateway plays one episode to its end")
    episode.add_argument("gateway")
    episode.add_argument("environment")
    args = parser.parse_args()
    deadline_s = time.monotonic() + args.timeout_s
    if args.command == "health":
        # All of them, so that one run names every service that ails.
        return max([check_health(address, args, deadline_s) for address in args.addresses])
    return check_episode(args, args.timeout_s)


def connect(address: str, args: argparse.Namespace, *, token: bool) -> grpc.Channel:
    """A channel that shows and asks for what the arguments say; the token goes to gateways, not to environments."""
    if args.authority is None:
        return grpc.insecure_channel(address)
    files = [path.read_bytes() if path else None for path in (args.authority, args.key, args.certificate)]
    credentials = grpc.ssl_channel_credentials(*files)
    if token and args.token_file:
        word = args.token_file.read_text().split()[0]
        credentials = grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(word))
    return grpc.secure_channel(address, credentials)


def check_health(address: str, args: argparse.Namespace, deadline_s: float) -> int:
    """0 as soon as the server answers SERVING, 1 at the deadline (a time.monotonic)."""
    answer = "no answer"
    with connect(address, args, token=False) as channel:
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


def check_episode(args: argparse.Namespace, timeout_s: float) -> int:
    """0 if one episode ends without an error."""
    gateway, environment = args.gateway, args.environment
    task = trajectory_pb2.Task(task_id="helm-test", environment=environment, split="train", index=0, seed=0)
    request = rollout_service_pb2.RunEpisodesRequest(tasks=[task], episodes_per_task=1)
    ended = (
        trajectory_pb2.EPISODE_STATUS_COMPLETED,
        trajectory_pb2.EPISODE_STATUS_TRUNCATED_TURNS,
        trajectory_pb2.EPISODE_STATUS_TRUNCATED_TOKENS,
    )
    with connect(gateway, args, token=True) as channel:
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
