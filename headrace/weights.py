"""The identity of weights: what a tensor's and a version's hash is, and how number formats travel.

Pure. Both ends use it: the trainer writes a manifest, an engine checks every byte against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import ml_dtypes
import numpy as np
import xxhash

from headrace.v1 import trainer_service_pb2 as pb

_DTYPES: dict[pb.TensorType, np.dtype] = {
    pb.TENSOR_TYPE_FLOAT32: np.dtype("<f4"),
    pb.TENSOR_TYPE_BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}


def tensor_info(name: str, array: np.ndarray) -> pb.TensorInfo:
    """What a manifest says of a C-contiguous array. Raises ValueError for a number format that does not travel."""
    return pb.TensorInfo(
        name=name, type=tensor_type(array.dtype), shape=array.shape, hash=tensor_hash(tensor_bytes(array))
    )


def tensor_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a C-contiguous array, without a copy."""
    if not array.flags.c_contiguous:
        raise ValueError("the array is not C-contiguous")
    return memoryview(array.reshape(-1).view(np.uint8))


def tensor_hash(data: memoryview) -> str:
    """XXH3-128 of a tensor's bytes, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def root_hash(tensors: Iterable[pb.TensorInfo]) -> str:
    """XXH3-128 over every tensor's name, type, shape and hash, in order, 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(f"{tensor.name}|{int(tensor.type)}|{','.join(map(str, tensor.shape))}|{tensor.hash}\n".encode())
    return digest.hexdigest()


def tensor_type(dtype: np.dtype) -> pb.TensorType:
    """The wire's name of a number format. Raises ValueError when it has none."""
    for number, known in _DTYPES.items():
        if known == dtype:
            return number
    raise ValueError(f"number format {dtype} does not travel; use one of {[str(known) for known in _DTYPES.values()]}")


def tensor_dtype(number: pb.TensorType) -> np.dtype:
    """NumPy's name of a number format. Raises ValueError for an unknown one."""
    if number not in _DTYPES:
        raise ValueError(f"tensor type {number} is unknown")
    return _DTYPES[number]


def size_bytes(tensor: pb.TensorInfo) -> int:
    """Bytes of a tensor's data. Raises ValueError for an unknown number format or a negative extent."""
    if any(extent < 0 for extent in tensor.shape):
        raise ValueError(f"{tensor.name} has shape {list(tensor.shape)}")
    return math.prod(tensor.shape) * tensor_dtype(tensor.type).itemsize
