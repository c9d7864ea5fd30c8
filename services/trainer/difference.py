"""The difference between two snapshots, tensor by tensor, each in whatever is smallest. Pure, and in threads."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from headrace import delta, weights
from headrace.shipment import Shipment
from headrace.v1 import trainer_service_pb2 as pb
from services.trainer.snapshot import Snapshot

_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))


def difference(new: Snapshot, base: Snapshot) -> Shipment:
    """What makes `new` of `base`: nothing for a tensor that is the same, a difference, or all of its bytes.

    A tensor that the base does not have in this type and shape travels whole. Takes long for a large model.
    """
    before = {info.name: (info, data) for info, data in zip(base.manifest.tensors, base.data, strict=True)}

    def parcel(info: pb.TensorInfo, data: memoryview) -> tuple[pb.TensorParcel, memoryview]:
        old, old_data = before.get(info.name, (None, None))
        if old is None or old_data is None or (old.type, old.shape) != (info.type, info.shape):
            return _parcel(pb.TENSOR_ENCODING_FULL, data)
        if old.hash == info.hash:
            return _parcel(pb.TENSOR_ENCODING_UNCHANGED, memoryview(b""))
        word_bytes = weights.tensor_dtype(info.type).itemsize
        encoded = delta.encode(np.frombuffer(data, np.uint8), np.frombuffer(old_data, np.uint8), word_bytes=word_bytes)
        if encoded is None:
            return _parcel(pb.TENSOR_ENCODING_FULL, data)
        return _parcel(pb.TENSOR_ENCODING_DELTA, memoryview(encoded))

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="difference") as threads:
        parcels = list(threads.map(parcel, new.manifest.tensors, new.data))
    manifest = pb.WeightManifest(
        policy_version=new.policy_version,
        base_policy_version=base.policy_version,
        tensors=new.manifest.tensors,
        root_hash=new.manifest.root_hash,
        parcels=[description for description, _ in parcels],
    )
    return Shipment(manifest, [data for _, data in parcels])


def _parcel(encoding: pb.TensorEncoding, data: memoryview) -> tuple[pb.TensorParcel, memoryview]:
    return pb.TensorParcel(encoding=encoding, size_bytes=len(data)), data
