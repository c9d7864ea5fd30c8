"""Which part of the prefix cache a request uses."""

import pytest

from services.inference.lineage import Lineage
from services.inference.namespace import namespace


@pytest.mark.parametrize(
    ("asked", "in_place", "recompute"),
    [
        (None, "5", "5"),
        ("3", "3", "5"),
        ("5", "5", "5"),
        ("7", "7 under 5", "5"),
        ("salt", "5 salted salt", "5 salted salt"),
        ("３", "5 salted ３", "5 salted ３"),
    ],
)
def test_a_namespace_holds_what_its_requests_may_share(asked, in_place, recompute):
    assert namespace(asked, 5, "in_place") == in_place
    assert namespace(asked, 5, "recompute") == recompute
    assert namespace(asked, 5, "in_place").asked == asked


def test_a_version_with_the_content_of_an_older_one_is_noticed():
    lineage = Lineage()
    assert [lineage.add(1, "a"), lineage.add(2, "b"), lineage.add(2, "b"), lineage.add(3, "c")] == [None] * 4
    assert lineage.add(9, "b") == 2
    assert lineage.add(10, "d") is None
