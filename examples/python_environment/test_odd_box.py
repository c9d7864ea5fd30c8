"""pytest test_odd_box.py"""

import asyncio

from odd_box import OddBox

from services.envs.environment import Action, Task, ToolCall, assistant


async def play(seed: int, answer: str | None) -> tuple[list[str], float | None]:
    """Weighs 0-2 against 3-5, then answers, or names the heavy box."""
    environment = OddBox()
    await environment.reset(Task(split="train", seed=seed))
    call = ToolCall(id="call_0", name="weigh", arguments_json='{"left": [0, 1, 2], "right": [3, 4, 5]}')
    weighed = await environment.step(Action(message=assistant("", call)))
    said = answer if answer is not None else f"It is {environment._heavy}"
    last = await environment.step(Action(message=assistant(said)))
    return [message.content for message in weighed.messages], last.reward


def test_the_right_box_earns_1_and_any_other_0():
    for seed in range(20):
        (side,), reward = asyncio.run(play(seed, None))
        assert side in ("left", "right", "neither") and reward == 1.0
        assert asyncio.run(play(seed, "none of them"))[1] == 0.0


def test_the_same_seed_hides_the_same_box():
    assert asyncio.run(play(7, None)) == asyncio.run(play(7, None))
