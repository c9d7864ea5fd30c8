"""Questions with short answers: what counts as right, and what brevity is worth."""

import pytest

from headrace.v1 import trajectory_pb2
from headrace.v1.environment_service_pb2 import Action
from services.envs.short_answer import CAPITALS, ShortAnswer


async def ask(environment: ShortAnswer, seed: int, answer) -> tuple[str, float]:
    """The question of a seed, and the reward of what `answer` makes of it."""
    first = await environment.reset(trajectory_pb2.Task(seed=seed))
    question = first.messages[0].content
    reply = trajectory_pb2.Message(role="assistant", content=answer(question))
    last = await environment.step(Action(message=reply))
    assert last.terminated
    assert last.reward is not None
    return question, last.reward


def total(question: str) -> int:
    words = question.rstrip("?").split()
    return int(words[2]) + int(words[4])


@pytest.mark.parametrize("seed", range(5))
async def test_a_sum_is_the_last_number(seed):
    environment = ShortAnswer(kinds=["sum"])
    for answer, reward in (
        (lambda q: f"{total(q)}", 1.0),
        (lambda q: f"5 + 5 = {total(q)}", 1.0),
        (lambda q: f"The sum of the two numbers is {total(q)}.", 0.7),
        (lambda q: f"{total(q)} or 99", 0.0),
        (lambda q: "none", 0.0),
        (lambda q: "", 0.0),
    ):
        assert (await ask(environment, seed, answer))[1] == reward


async def test_a_capital_counts_alone_and_in_any_case():
    environment = ShortAnswer(kinds=["capital"])

    def capital(question: str) -> str:
        return CAPITALS[question.removeprefix("What is the capital of ").rstrip("?")]

    assert (await ask(environment, 1, lambda q: capital(q).lower()))[1] == 1.0
    assert (await ask(environment, 1, lambda q: " ".join(CAPITALS.values())))[1] == 0.0


@pytest.mark.parametrize("answer", ["9" * 5000, "٩" * 3, ""])
async def test_a_number_of_any_length_or_script_is_an_answer_and_a_wrong_one(answer):
    assert (await ask(ShortAnswer(kinds=["sum"]), 1, lambda _: answer))[1] == 0.0


async def test_the_same_seed_asks_the_same_and_seeds_differ():
    questions = [(await ask(ShortAnswer(), seed, str))[0] for seed in (*range(20), *range(20))]
    assert questions[:20] == questions[20:]
    assert len(set(questions)) > 10


@pytest.mark.parametrize("options", [{"kinds": []}, {"kinds": ["riddle"]}, {"largest": 0}, {"verbosity_cost": 1.0}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        ShortAnswer(**options)
