"""Whether the images of a message can be: their number, size and type. Pure, and light enough for environments."""

from __future__ import annotations

from headrace.v1 import trajectory_pb2 as pb

# What a file of each type begins with.
TYPES = {
    "image/png": b"\x89PNG\r\n\x1a\n",
    "image/jpeg": b"\xff\xd8\xff",
    "image/gif": b"GIF8",
    "image/webp": b"RIFF",
}
MAX_IMAGE_BYTES, MAX_IMAGES = 20 * 1024 * 1024, 16  # of one message
_OF_ROLES = ("user", "tool")


class ImageError(ValueError):
    """Images that a message cannot carry, in one line."""


def check(message: pb.Message) -> None:
    """Raises ImageError unless the message can carry its images."""
    if not message.images:
        return
    if message.role not in _OF_ROLES:
        raise ImageError(f"a message of the role {message.role!r} carries images; only user and tool messages do")
    if len(message.images) > MAX_IMAGES:
        raise ImageError(f"a message carries {len(message.images)} images; at most {MAX_IMAGES} are allowed")
    for number, image in enumerate(message.images):
        if image.mime_type not in TYPES:
            raise ImageError(f"images[{number}].mime_type is {image.mime_type!r}, not one of {sorted(TYPES)}")
        if len(image.data) > MAX_IMAGE_BYTES:
            raise ImageError(
                f"images[{number}].data has {len(image.data)} bytes; at most {MAX_IMAGE_BYTES} are allowed"
            )
        if not image.data.startswith(TYPES[image.mime_type]):
            raise ImageError(f"images[{number}].data does not begin like a file of the type {image.mime_type}")
