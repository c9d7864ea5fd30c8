"""services.envs.reasoning: generated puzzles and the package's scorers, through a real server."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym", reason="reasoning_gym needs a C compiler to install")

from services.envs import reasoning
from services.envs.reasoning import Reasoning, Source
from tests import processes
from tests.envs.conversation import DEMONSTRATION, answer, play, reset, say, serving


class Direct:
    """Runs blocking calls at once, where they were made."""

    async def call(self, function, *arguments, timeout_s=None):
        return function(*arguments)


def made(**options) -> Reasoning:
    environment = Reasoning(**options)
    environment.executor = Direct()
    return environment


async def asked(environment: Reasoning, **fields) -> str:
    return (await environment.reset(reset("puzzle", **fields).reset)).messages[0].content


async def test_the_right_answer_earns_1_and_a_wrong_one_0():
    mixture = {"chain_sum": {}, "basic_arithmetic": {}, "graph_color": {}}
    async with serving({"puzzle": functools.partial(Reasoning, mixture)}) as (stub, _):
        for seed in range(6):
            right = await play(
                stub, reset("puzzle", seed=seed, purpose=DEMONSTRATION), lambda seen: answer(seen.demonstration)
            )
            assert right[-1].reward == 1.0 and right[-1].metrics == {"answered": 1.0, "correct": 1.0}
            assert "between <answer> and </answer>" in right[0].messages[0].content
        for wrong in ["<answer>none</answer>", "no tag", "", "\0", "<answer>", "<answer>" + "9" * 30_000 + "</answer>"]:
            responses = await play(stub, reset("puzzle"), lambda _, wrong=wrong: say(wrong))
            assert responses[-1].reward == 0.0 and responses[-1].terminated
            assert responses[-1].metrics["answered"] == float("</answer>" in wrong)


async def test_without_a_tag_the_whole_reply_is_the_answer():
    environment = made(answer_tag="")
    assert "<" not in await asked(environment)
    right = (await environment.demonstrate()).content
    assert (await environment.step(say(f" {right}\n").action)).reward == 1.0


@pytest.mark.parametrize(("partial", "expected"), [(True, 0.01), (False, 0.0)])
async def test_shares_of_a_reward_can_be_switched_off(partial, expected):
    environment = made(datasets="countdown", partial_credit=partial)
    await asked(environment)
    assert (await environment.step(say("<answer>1/0</answer>").action)).reward == pytest.approx(expected)


async def test_the_same_task_is_the_same_question_and_splits_share_none():
    environment = made(datasets={"letter_counting": {"weight": 3}, "chain_sum": {}})

    async def questions(split: str) -> list[str]:
        return [await asked(environment, split=split, seed=seed) for seed in range(40)]

    train, test = await questions("train"), await questions("test")
    assert train == await questions("train") and not set(train) & set(test)
    kinds = ["How many times" in question for question in train]
    assert len(set(train)) == 40 and 20 < sum(kinds) < 40


async def test_a_level_and_a_config_make_it_harder():
    def lengths(**settings) -> list[int]:
        (source,) = Reasoning({"chain_sum": settings})._sources
        return [reasoning.question(source, False, seed)["metadata"]["num_terms"] for seed in range(12)]

    assert max(lengths(level=0)) < max(lengths(level=3))
    assert set(lengths(level=0, config={"min_terms": 7, "max_terms": 7})) == {7}


@pytest.mark.parametrize("name", sorted(set(reasoning.EVALUATED) - reasoning.UNORDERED))
def test_code_in_an_answer_is_never_run(name, tmp_path):
    canary = tmp_path / "canary"
    source = Source(name)
    entry = reasoning.question(source, False, 1)
    for code in [f"__import__('pathlib').Path({str(canary)!r}).touch()", f"[open({str(canary)!r}, 'w')]", "9**9**9**9"]:
        assert reasoning.score(source, entry, code) < 0.1
    assert not canary.exists()
    assert reasoning.score(source, entry, reasoning.example(name, entry)) == 1.0


@pytest.mark.parametrize("text", ["3*Integral(x**2, x) + C", "Integral(2*x*exp(x), x)"])
def test_an_unevaluated_integral_is_no_answer(text):
    source = Source("simple_integration")
    assert reasoning.score(source, reasoning.question(source, False, 1), text) == 0.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"datasets": "chess"}, "no dataset 'chess'"),
        ({"datasets": {}}, "at least one"),
        ({"datasets": {"chain_sum": {"wait": 1}}}, "no setting"),
        ({"datasets": {"chain_sum": {"weight": 0}}}, "above 0"),
        ({"datasets": {"chain_sum": {"config": {"min_terms": 0}}}}, "refuses its config"),
        ({"datasets": {"chain_sum": {"config": {"colour": 0}}}}, "refuses its config"),
        ({"datasets": {"gsm_symbolic": {"level": 1}}}, "no curriculum"),
        ({"answer_tag": "a b"}, "a word"),
    ],
)
def test_what_makes_no_task_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Reasoning(**options)


@pytest.mark.skipif(not sys.flags.hash_randomization, reason="this process has PYTHONHASHSEED=0")
def test_what_differs_from_process_to_process_is_refused_unless_python_s_hashes_are_fixed():
    with pytest.raises(ValueError, match="PYTHONHASHSEED=0"):
        Reasoning("ransom_note")


@pytest.mark.slow
def test_every_dataset_gives_1_for_its_own_answer_and_the_same_question_in_every_process():
    runs = [
        subprocess.run(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("reasoning_sweep.py"))],
            cwd=processes.ROOT,
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(processes.ROOT)},
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1] and len(runs[0].splitlines()) == 105
    wrong = [line for line in runs[0].splitlines() if not line.endswith(" 1.0")]
    assert [line.split()[0] for line in wrong] == ["boxnet", "rush_hour"]  # they have no answer of their own
