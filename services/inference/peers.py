"""Serves this engine's weights to its peers: GetWeights of TrainerService, over gRPC and beside it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from headrace import address, rpc
from headrace.bulk import BulkServer
from headrace.security import PLAIN, Security
from headrace.v1 import trainer_service_pb2_grpc
from headrace.weight_service import SERVICE, WeightServicer
from services.inference.shelf import Shelf

_ANY_HOST = ("", "0.0.0.0", "::")


@contextlib.asynccontextmanager
async def serving(
    shelf: Shelf, listen: str, *, run_id: str, bulk_listen: str = "", security: Security = PLAIN
) -> AsyncIterator[str]:
    """Serves while the body runs; yields the address for peers, without a host if it listens on all of them.

    Args:
        listen: "host:port" of GetWeights (port 0: any).
        bulk_listen: "host:port" for bytes beside gRPC; "" for none. Not used under TLS, which it does not speak.

    Raises:
        AddressInUse, StartupError: see rpc.Server.start.
    """
    bulk = BulkServer.start(bulk_listen) if bulk_listen and security.tls is None else None
    try:
        add = trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server
        service = rpc.Service(SERVICE, add, WeightServicer(shelf, run_id=run_id, bulk=bulk))
        server = await rpc.Server.start(listen, [service], security=security)
        await server.set_serving(True)
        host, _ = address.split(listen)
        try:
            yield f"{'' if host in _ANY_HOST else f'[{host}]' if ':' in host else host}:{server.port}"
        finally:
            await server.stop(0)
    finally:
        if bulk:
            await bulk.stop()
