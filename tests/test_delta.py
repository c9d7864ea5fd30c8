"""headrace.delta: every bit comes back, and what no encoder wrote is refused."""

import struct

import ml_dtypes
import numpy as np
import pytest
import zstandard

from headrace import delta

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BLOCK = delta.BLOCK_WORDS


def words(count, seed=0, width=2):
    """Random bits: NaNs with any payload, infinities, both zeros and subnormals among them."""
    return np.random.default_rng(seed).integers(0, 256, count * width, dtype=np.uint8)


def changed(base, positions, width=2):
    new = base.copy()
    view = new.view(f"<u{width}")
    view[positions] ^= np.random.default_rng(1).integers(1, 1 << (8 * width), len(positions), dtype=view.dtype)
    return new


def round_trip(new, base, width=2):
    before = base.copy()
    encoded = delta.encode(new, base, word_bytes=width)
    assert encoded is not None
    np.testing.assert_array_equal(delta.decode(encoded, base, word_bytes=width), new)
    np.testing.assert_array_equal(base, before)
    return encoded


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("count", [1009, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7919])
def test_sparse_changes(count, width):
    base = words(count, width=width)
    positions = np.unique(np.r_[0, count - 1, np.random.default_rng(2).integers(0, count, count // 100)])
    encoded = round_trip(changed(base, positions, width), base, width)
    assert len(encoded) < base.size / 10


def test_no_change_costs_a_header_a_block():
    base = words(BLOCK + 5)
    assert len(round_trip(base, base)) == 16


@pytest.mark.parametrize("width", [2, 4])
def test_every_word_changes_by_its_last_bit(width):
    base = words(5003, width=width)
    new = (base.view(f"<u{width}") ^ 1).view(np.uint8)
    round_trip(new, base, width)


def test_what_would_not_be_smaller_is_not_encoded():
    assert delta.encode(words(1009, seed=1), words(1009, seed=2), word_bytes=2) is None
    assert delta.encode(changed(words(1), [0]), words(1), word_bytes=2) is None


def test_signs_of_zero_and_payloads_of_nan_are_bits_like_others():
    base = np.zeros(1000, np.float32)
    new = base.copy()
    new[1] = -0.0
    new.view(np.uint32)[[3, 500]] = [0x7FC00001, 0xFF800123]
    result = round_trip(new.view(np.uint8), base.view(np.uint8), 4)
    assert len(result) < 100
    half = np.full(1000, np.nan, BFLOAT16)
    other = half.copy()
    other.view(np.uint16)[7] ^= 1
    round_trip(other.view(np.uint8), half.view(np.uint8))


def test_a_random_flip_is_refused_or_changes_the_result():
    base = words(3 * BLOCK // 2)
    new = changed(base, np.arange(5, 9000, 7))
    encoded = delta.encode(new, base, word_bytes=2)
    random = np.random.default_rng(3)
    for _ in range(60):
        damaged = bytearray(encoded)
        damaged[random.integers(len(damaged))] ^= 1 << random.integers(8)
        try:
            result = delta.decode(bytes(damaged), base, word_bytes=2)
        except ValueError:
            continue
        assert result.size == new.size


@pytest.mark.parametrize("cut", [0, 3, 8, 11, -1])
def test_a_cut_difference_is_refused(cut):
    base = words(2000)
    encoded = delta.encode(changed(base, [3, 1999]), base, word_bytes=2)
    with pytest.raises(ValueError):
        delta.decode(encoded[:cut], base, word_bytes=2)


def test_more_than_the_blocks_is_refused():
    base = words(2000)
    with pytest.raises(ValueError, match="goes on"):
        delta.decode(delta.encode(base, base, word_bytes=2) + b"x", base, word_bytes=2)


def test_a_frame_for_no_changes_is_refused():
    frame = zstandard.ZstdCompressor().compress(b"")
    with pytest.raises(ValueError, match="no words"):
        delta.decode(struct.pack("<II", 0, len(frame)) + frame, words(100), word_bytes=2)


def test_positions_outside_of_the_tensor_are_refused():
    base = words(100)
    for gaps in ([101], [1, 0], [2**32 - 1, 5]):
        planes = np.array(gaps, "<u4").view(np.uint8).reshape(-1, 4).T.tobytes() + bytes(2 * len(gaps))
        frame = zstandard.ZstdCompressor().compress(planes)
        with pytest.raises(ValueError, match="outside"):
            delta.decode(struct.pack("<II", len(gaps), len(frame)) + frame, base, word_bytes=2)
