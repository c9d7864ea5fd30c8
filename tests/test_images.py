"""headrace.images, and the two borders that use it."""

import pytest

from headrace import images
from headrace import trajectory as records
from headrace.v1 import trajectory_pb2 as pb
from services.envs.contract import ContractError, response
from services.envs.environment import TimeStep

PNG = b"\x89PNG\r\n\x1a\n"


def message(*pictures, role="user"):
    return pb.Message(role=role, images=[pb.Image(data=data, mime_type=kind) for data, kind in pictures])


def test_an_image_passes_both_borders():
    shown = message((PNG, "image/png"), (b"\xff\xd8\xff\xe0", "image/jpeg"))
    images.check(shown)
    sent = response(TimeStep([shown]), after_reset=True, rewarded=False, metric_names=())
    assert sent.messages[0] == shown
    trajectory = pb.Trajectory(messages=[shown], status=pb.EPISODE_STATUS_ENVIRONMENT_ERROR)
    records.check_trajectory(trajectory, purpose=pb.PURPOSE_TRAINING, vocabulary_size=9)


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        (message((PNG, "image/tiff")), "mime_type"),
        (message((b"", "image/png")), "begin"),
        (message((b"\xff\xd8\xff", "image/png")), "begin"),
        (message((PNG + bytes(images.MAX_IMAGE_BYTES), "image/png")), "at most"),
        (message(*[(PNG, "image/png")] * (images.MAX_IMAGES + 1)), "at most"),
        (message((PNG, "image/png"), role="assistant"), "role"),
    ],
)
def test_what_is_no_image_passes_none(broken, word):
    with pytest.raises(images.ImageError, match=word):
        images.check(broken)
    with pytest.raises(ContractError, match=word):
        response(TimeStep([broken]), after_reset=True, rewarded=False, metric_names=())
    trajectory = pb.Trajectory(messages=[broken], status=pb.EPISODE_STATUS_CANCELLED)
    with pytest.raises(records.RecordError, match=word):
        records.check_trajectory(trajectory, purpose=pb.PURPOSE_TRAINING, vocabulary_size=9)
