"""services.trainer.fanout: trees in which nobody waits for somebody who waits for him."""

from services.trainer.fanout import Fanout, Watcher


def watchers(count, held=0, serving=None):
    return {f"e{n}": Watcher(held, f"10.0.0.{n}:1" if serving is None or n in serving else "") for n in range(count)}


def plan(fanout, there, version=5, base=None):
    """The addresses' last numbers of each engine's peers."""
    return {
        engine: [int(peer.address.split(":")[0].split(".")[-1]) for peer in fanout.peers(engine, version, base, there)]
        for engine in there
    }


def test_one_engine_asks_the_trainer_and_the_others_make_a_tree():
    assert plan(Fanout(), watchers(8)) == {
        "e0": [],
        "e1": [0],
        "e2": [0],
        "e3": [1, 0],
        "e4": [1, 0],
        "e5": [2, 0],
        "e6": [2, 0],
        "e7": [3, 1, 0],
    }


def test_who_asks_again_stays_in_his_place():
    fanout, there = Fanout(), watchers(8)
    assert plan(fanout, there) == plan(fanout, there)


def test_an_engine_that_does_not_serve_is_a_leaf():
    there = watchers(4, serving=[1, 2])
    assert plan(Fanout(), there) == {"e0": [], "e1": [], "e2": [1], "e3": [1]}
    assert plan(Fanout(), watchers(3, serving=[])) == {"e0": [], "e1": [], "e2": []}


def test_differences_come_from_those_who_get_the_same_ones():
    fanout = Fanout()
    there = {**watchers(2, held=4), "n2": Watcher(3, "10.0.0.2:1"), "n3": Watcher(3, "10.0.0.3:1")}
    assert fanout.peers("e0", 5, 4, there) == []
    assert fanout.peers("n2", 5, 3, there) == []
    assert [peer.address for peer in fanout.peers("e1", 5, 4, there)] == ["10.0.0.0:1"]
    assert [peer.address for peer in fanout.peers("n3", 5, 3, there)] == ["10.0.0.2:1"]


def test_a_newcomer_asks_those_who_hold_the_version_in_turn():
    fanout, there = Fanout(), watchers(3)
    plan(fanout, there)
    there = {**watchers(3, held=5), "n7": Watcher(0, "10.0.0.7:1"), "n8": Watcher(0, "10.0.0.8:1")}
    first = fanout.peers("n7", 5, None, there)
    second = fanout.peers("n8", 5, None, there)
    assert [peer.policy_version for peer in first] == [5, 5]
    assert first[0].address != second[0].address


def test_a_dead_parent_is_left_out():
    fanout, there = Fanout(), watchers(4)
    plan(fanout, there)
    del there["e1"]
    assert [peer.address for peer in fanout.peers("e3", 5, None, there)] == ["10.0.0.0:1"]


def test_a_dead_roots_children_go_to_each_other_and_not_both_to_the_trainer():
    fanout, there = Fanout(), watchers(8)
    plan(fanout, there)
    del there["e0"]
    after = plan(fanout, there)
    assert after == {
        "e1": [5, 2],
        "e2": [],
        "e3": [1, 5, 2],
        "e4": [1, 5, 2],
        "e5": [2],
        "e6": [2],
        "e7": [3, 1, 5],
    }


def test_one_child_of_a_root_that_failed_goes_to_the_trainer_though_the_root_still_watches():
    fanout, there = Fanout(), watchers(8)
    plan(fanout, there)
    failed = [there["e0"].address]
    assert [peer.address for peer in fanout.peers("e1", 5, None, there, failed)] == ["10.0.0.5:1", "10.0.0.2:1"]
    assert fanout.peers("e2", 5, None, there, failed) == []
    assert [peer.address for peer in fanout.peers("e1", 5, None, there, failed)] == ["10.0.0.5:1", "10.0.0.2:1"]
    assert [peer.address for peer in fanout.peers("e6", 5, None, there)] == ["10.0.0.2:1"]  # others hear nothing of it


def test_who_is_named_first_is_asked_first_whatever_he_failed_at():
    fanout, there = Fanout(), {**watchers(2, held=5), "n2": Watcher(0, "10.0.0.2:1")}
    (first, second) = fanout.peers("n2", 5, None, there)
    assert fanout.peers("n2", 5, None, there, [first.address]) == [second]
    assert fanout.peers("n2", 5, None, there, [first.address, second.address]) == []


def test_who_comes_back_with_another_base_finds_another_parent():
    fanout = Fanout()
    there = {**watchers(2, held=4), "n2": Watcher(3, "10.0.0.2:1")}
    assert fanout.peers("e0", 5, 4, there) == []
    assert fanout.peers("n2", 5, 3, there) == []
    assert [peer.address for peer in fanout.peers("n2", 5, 4, there)] == ["10.0.0.0:1"]


def test_a_parent_that_serves_no_more_is_not_named():
    fanout, there = Fanout(), watchers(2)
    plan(fanout, there)
    assert fanout.peers("e1", 5, None, {**there, "e0": Watcher(0, "")}) == []


def test_nobody_is_put_below_himself():
    fanout, there = Fanout(), watchers(4)
    plan(fanout, there)
    del there["e0"], there["e2"]
    assert plan(fanout, there) == {"e1": [], "e3": [1]}  # e3 was below e1 before


def test_a_new_version_makes_new_trees():
    fanout, there = Fanout(), watchers(3)
    plan(fanout, there)
    assert fanout.peers("e2", 6, None, there) == []
    assert [peer.address for peer in fanout.peers("e0", 6, None, there)] == ["10.0.0.2:1"]
