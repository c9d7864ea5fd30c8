"""services.trainer.lineage: ages in updates."""

import pytest

from services.trainer.lineage import Lineage


def test_age_is_the_difference_of_versions():
    lineage = Lineage()
    for version in (1, 2, 3):
        lineage.publish(version)
    assert [lineage.age(version) for version in (1, 2, 3)] == [2, 1, 0]
    assert lineage.newest == 3


@pytest.mark.parametrize("version", [0, -1, 4])
def test_what_was_never_published_has_no_age(version):
    lineage = Lineage({1: 1, 3: 2})
    with pytest.raises(ValueError, match="has not been published"):
        lineage.age(version)


def test_after_a_restart_lost_versions_are_as_far_as_they_had_run_ahead():
    before = Lineage()
    for version in (1, 2, 3):
        before.publish(version)
    after = Lineage(before.positions)  # the checkpoint knows 3; 4, 5 and 6 were lost with the process
    after.publish(7, updated=False)
    assert {version: after.age(version) for version in (2, 3, 4, 6, 7)} == {2: 1, 3: 0, 4: 1, 6: 3, 7: 0}
    after.publish(8)
    assert {version: after.age(version) for version in (3, 4, 7, 8)} == {3: 1, 4: 2, 7: 1, 8: 0}


def test_forgotten_versions_are_older_than_all_others():
    lineage = Lineage()
    for version in range(1, 3000):
        lineage.publish(version)
    assert lineage.age(5) > lineage.age(2500)
    assert len(lineage.positions) <= 1024


def test_a_restart_without_a_checkpoint_begins_again_from_version_1():
    lineage = Lineage()
    lineage.publish(4)
    assert {version: lineage.age(version) for version in (1, 2, 3, 4)} == {1: 0, 2: 1, 3: 2, 4: 0}
