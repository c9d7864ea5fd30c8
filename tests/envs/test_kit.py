"""headrace.environment_kit: a sound server keeps every rule, and each rule is broken by a server that breaks it."""

import json

import pytest

from headrace.environment_kit import check
from headrace.environment_kit.check import Result
from headrace.environment_kit.rules import Settings
from headrace.errors import StartupError
from tests.envs import rule_breakers

CHECKED = Settings(
    timeout_s=60, close_timeout_s=30, capacity=rule_breakers.CAPACITY, parallel=40, slow=True, slow_s=0.05
)


async def findings(servicer: rule_breakers.Sound, *only: str, **changes) -> dict[str, check.Finding]:
    settings = Settings(**{**vars(CHECKED), **changes})
    async with rule_breakers.serving(servicer) as address:
        found = [finding async for finding in check.check(address, settings, only=only or check.NAMES)]
    return {finding.rule: finding for finding in found}


async def test_a_sound_server_keeps_every_rule():
    found = await findings(rule_breakers.Sound())
    assert {rule: finding.reason for rule, finding in found.items() if finding.result != Result.KEPT} == {}
    assert tuple(found) == check.NAMES


@pytest.mark.parametrize(
    ("name", "rule", "says"),
    [
        ("WithoutDescription", "described", "the description is ''"),
        ("SilentFirst", "first_response", "the episode is open but no message follows"),
        ("RewardFirst", "first_response", "before there was an action"),
        ("SplitWithoutTasks", "first_response", "NOT_FOUND (not yet)"),
        ("AnswersTwice", "one_answer", "a response came that no request asked for"),
        ("NeverAnswers", "one_answer", "no response within 3 s"),
        ("StaysOpen", "one_answer", "the stream stays open 3 s after"),
        ("ToolsLate", "one_answer", "tools, which belong to the reset"),
        ("Dice", "determinism", "two episodes of one task differ at response 0"),
        ("RaisesAtMalformed", "malformed_action", "no JSON at character 3"),
        ("RaisesAtUnknownTool", "malformed_action", "no_such_tool"),
        ("ResetsAgain", "reset_twice", "a second reset was answered, not refused with FAILED_PRECONDITION"),
        ("ResetsAgainRudely", "reset_twice", "refused with INTERNAL, not FAILED_PRECONDITION"),
        ("KnowsEverything", "unknown_task", "an unknown environment was answered"),
        ("KnowsEverySplit", "unknown_task", "an unknown split was answered"),
        ("NaN", "reward", "[nan]"),
        ("Unrewarded", "reward", "no reward was given"),
        ("EndsTwice", "reward", "terminated and truncated are both set"),
        ("UnnamedMetric", "metric_names", "'unheard_of' is not listed in ['turns']"),
        ("InfiniteMetric", "metric_names", "the metric 'turns' is inf"),
        ("ShowsOnce", "demonstration", "no assistant message demonstrates"),
        ("ShowsAlways", "demonstration", "a task for training was answered with a demonstration"),
        ("GoesOn", "after_the_end", "an action after the episode's end was answered"),
        ("Boundless", "capacity", "episode 5 of 4 was not refused"),
        ("FullRudely", "capacity", "INTERNAL (full)"),
        ("Leaks", "cancel", "after 4 streams were cancelled, 4 of their places are still taken"),
        ("Shares", "parallel", "went otherwise than alone"),
        ("TiresOfSilence", "long_step", "UNAVAILABLE (idle)"),
    ],
)
async def test_each_broken_rule_is_found_with_a_reproduction(name, rule, says):
    waits = name in ("NeverAnswers", "StaysOpen")
    changes = {"timeout_s": 3 if waits else 60, "close_timeout_s": 1, "slow_s": 1.0 if rule == "long_step" else 0.05}
    found = (await findings(getattr(rule_breakers, name)(), rule, **changes))[rule]
    assert found.result == Result.BROKEN and says in found.reason
    text = check.report(found)
    assert text.startswith("BROKEN") and rule in text
    assert rule == "described" or "> reset {" in text or "> action {" in text


def breakers() -> dict[str, str]:
    """Each breaker's rule, from the table above."""
    (mark,) = test_each_broken_rule_is_found_with_a_reproduction.pytestmark
    return {name: rule for name, rule, _ in mark.args[1]}


def test_every_rule_has_a_breaker_and_every_breaker_a_rule():
    assert set(breakers().values()) == set(check.NAMES)
    kinds = {kind.__name__ for kind in rule_breakers.Sound.__subclasses__()}
    assert kinds == set(breakers())


@pytest.mark.parametrize("name", ["Dice", "UnnamedMetric", "ShowsOnce", "RaisesAtMalformed", "ResetsAgain", "GoesOn"])
async def test_a_breaker_breaks_its_own_rule_only(name):
    found = await findings(getattr(rule_breakers, name)(), close_timeout_s=5)
    broken = {rule for rule, finding in found.items() if finding.result == Result.BROKEN}
    # Its expert shows nothing to follow, so that no whole episode of an expert can be judged either.
    also = {"reward"} if name == "ShowsOnce" else set()
    assert broken == {breakers()[name]} | also


async def test_what_cannot_be_checked_says_what_would_let_it():
    found = await findings(rule_breakers.Sound(), "long_step", "demonstration", slow=False)
    assert found["long_step"].result == Result.UNCHECKED and "--slow" in found["long_step"].reason
    found = await findings(rule_breakers.Boundless(), "capacity", "cancel", capacity=None)
    assert {finding.result for finding in found.values()} == {Result.UNCHECKED}
    assert "give --capacity N" in found["capacity"].reason


async def test_a_capacity_is_found_out():
    found = await findings(rule_breakers.Sound(), "capacity", "cancel", capacity=None)
    assert {finding.result for finding in found.values()} == {Result.KEPT}


async def test_who_is_not_there_or_not_offered_is_said():
    with pytest.raises(StartupError, match="nothing answers"):
        async for _ in check.check("127.0.0.1:9", Settings(timeout_s=0.5)):
            pass
    async with rule_breakers.serving(rule_breakers.Sound()) as address:
        with pytest.raises(StartupError, match="no environment 'chess', but count_down"):
            async for _ in check.check(address, CHECKED, environment="chess"):
                pass


def test_a_finding_is_json():
    finding = check.Finding("e", "r", "says", Result.BROKEN, "why", [["> reset {}"]], 0.5)
    assert json.loads(json.dumps(vars(finding)))["result"] == "broken"
