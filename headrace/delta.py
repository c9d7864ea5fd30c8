"""The exact difference between two versions of a tensor, as few bytes.

A step of reinforcement learning changes about one bfloat16 element in a hundred, mostly by its last bit. So what
travels is where a word changed, and the XOR of old and new there; where most words changed, as in float32, the XOR of
all of them. Both go byte plane by byte plane through zstd, for planes of high bytes are nearly all zero. Words are
compared as bits: NaN payloads and the sign of zero arrive like everything else.

A difference is a sequence of blocks, each of BLOCK_WORDS words of the tensor, the last of what is left:

    uint32  number of changed words, or 2^32 - 1: the XOR of all words follows
    uint32  bytes of the zstd frame; 0 when nothing changed
    frame   planes of the gaps (uint32, each position minus the one before, the first plus 1), then planes of the XORs

Pure, and in NumPy and zstd calls that release the interpreter, so that it can run beside what serves.
"""

from __future__ import annotations

import struct

import numpy as np
import zstandard

BLOCK_WORDS = 1 << 20

_HEADER = struct.Struct("<II")
_ALL = 0xFFFF_FFFF
# Gaps cost 4 bytes of planes for each changed word; from here on the XOR of all words was smaller, on float32 steps.
_DENSE_FRACTION = 0.5
_LEVEL = 1  # level 3 saved nothing and level -1 was no faster
_WORDS: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def encode(new: np.ndarray, base: np.ndarray, *, word_bytes: int) -> bytes | None:
    """The difference, or None when it would not be smaller than `new` itself.

    Args:
        new: uint8[n], n a multiple of word_bytes.
        base: uint8[n].
        word_bytes: size of an element, 2 or 4.
    """
    words, old = new.view(_WORDS[word_bytes]), base.view(_WORDS[word_bytes])
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    blocks, size = [], 0
    for start in range(0, len(words), BLOCK_WORDS):
        block = _encode_block(words[start : start + BLOCK_WORDS], old[start : start + BLOCK_WORDS], compressor)
        size += len(block)
        if size >= new.size:
            return None
        blocks.append(block)
    return b"".join(blocks)


def decode(difference: memoryview | bytes, base: np.ndarray, *, word_bytes: int) -> np.ndarray:
    """uint8[n], the new bytes; `base` stays as it is. Raises ValueError for what no encoder wrote."""
    result = base.copy()
    words, rest = result.view(_WORDS[word_bytes]), memoryview(difference)
    decompressor = zstandard.ZstdDecompressor()
    for start in range(0, len(words), BLOCK_WORDS):
        if len(rest) < _HEADER.size:
            raise ValueError("the difference ends early")
        count, size = _HEADER.unpack_from(rest)
        frame, rest = rest[_HEADER.size : _HEADER.size + size], rest[_HEADER.size + size :]
        if len(frame) < size:
            raise ValueError("the difference ends early")
        if size or count:
            _decode_block(words[start : start + BLOCK_WORDS], count, frame, decompressor)
    if rest:
        raise ValueError("the difference goes on after the last block")
    return result


def _encode_block(new: np.ndarray, old: np.ndarray, compressor: zstandard.ZstdCompressor) -> bytes:
    changes = new ^ old
    changed = np.flatnonzero(changes)
    if not changed.size:
        return _HEADER.pack(0, 0)
    if changed.size > _DENSE_FRACTION * new.size:
        count, content = _ALL, _planes(changes)
    else:
        gaps = np.diff(changed, prepend=-1).astype("<u4")
        count, content = changed.size, np.concatenate([_planes(gaps), _planes(changes[changed])])
    frame = compressor.compress(content.data)
    return _HEADER.pack(count, len(frame)) + frame


def _decode_block(words: np.ndarray, count: int, frame: memoryview, decompressor: zstandard.ZstdDecompressor) -> None:
    """Changes the words in place."""
    width = words.itemsize
    size = words.nbytes if count == _ALL else count * (4 + width)
    if count == 0 or (count != _ALL and count > len(words)):
        raise ValueError("a block changes no words, or more than it has")
    try:
        # Its own word for its size must not make us allocate what it likes.
        if zstandard.frame_content_size(frame) != size:
            raise ValueError("a block has another size than its header says")
        content = np.frombuffer(decompressor.decompress(frame), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"a block is damaged: {error}") from error
    if count == _ALL:
        words ^= _words(content, words.dtype)
        return
    gaps = _words(content[: 4 * count], np.dtype("<u4"))
    positions = np.cumsum(gaps, dtype=np.int64) - 1
    if not gaps.all() or positions[-1] >= len(words):
        raise ValueError("a block changes words outside of it")
    words[positions] ^= _words(content[4 * count :], words.dtype)


def _planes(words: np.ndarray) -> np.ndarray:
    """uint8: the first byte of every word, then the second of every word, and so on."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, words.itemsize).T).reshape(-1)


def _words(planes: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """What `_planes` took apart."""
    return np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).reshape(-1).view(dtype)
