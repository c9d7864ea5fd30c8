"""services.envs.tools: typed methods as tools, called at once, answered in order, wrong calls answered too."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from headrace.v1.environment_service_pb2 import Action, Tool
from services.envs.environment import Message, Task, TimeStep, ToolCall, assistant
from services.envs.tools import BoundTool, ToolEnvironment, ToolError, tool


@dataclass
class Item:
    name: str
    price: int


class Shop(ToolEnvironment):
    """Buys things."""

    metric_names = ("spent",)

    def __init__(self, max_turns: int | None = None):
        self.max_turns = max_turns
        self.together = asyncio.Barrier(2)
        self.closed: list[str] = []

    async def start(self, task: Task, draw: random.Random) -> str:
        self.price = draw.randint(1, 1000)
        return "buy"

    @tool
    def look(self, name: str, amount: int = 1) -> Item:
        """Looks a thing up.

        Args:
            name: of the thing
        """
        return Item(name, self.price * amount)

    @tool
    async def meet(self, order: int) -> int:
        """Returns once two calls are in it, the earlier call last."""
        await self.together.wait()
        await asyncio.sleep(0.01 * (2 - order))
        return order

    @tool
    def refuse(self) -> str:
        """Is never right."""
        raise ToolError("we have none")

    @tool
    def crash(self) -> None:
        """Has a bug."""
        raise ZeroDivisionError("a bug")

    @tool
    async def wait(self) -> None:
        """Waits for ever."""
        try:
            await asyncio.Event().wait()
        finally:
            self.closed.append("wait")

    @tool
    def buy(self) -> None:
        """Ends it."""
        self.finish(0.5)

    async def answer(self, message: Message) -> TimeStep:
        return TimeStep(reward=float(message.content == "done"), terminated=True, metrics={"spent": 3.0})


def call(name: str, /, **arguments) -> ToolCall:
    return ToolCall(id=f"call_{name}", name=name, arguments_json=json.dumps(arguments))


def act(*calls: ToolCall, malformed: Sequence[str] = ()) -> Action:
    return Action(message=assistant("", *calls), malformed_tool_calls=malformed)


async def started(**options) -> Shop:
    shop = Shop(**options)
    await shop.reset(Task(seed=1))
    return shop


async def test_the_policy_is_told_the_tools():
    first = await Shop().reset(Task(seed=1))
    assert [record.name for record in first.tools] == ["look", "meet", "refuse", "crash", "wait", "buy"]
    look = first.tools[0]
    assert look.description == "Looks a thing up."
    assert json.loads(look.parameters_json) == {
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "of the thing"},
            "amount": {"type": "integer", "default": 1},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    assert Shop.metric_names == ("calls", "failed_calls", "spent")


async def test_calls_of_a_turn_run_at_once_and_are_answered_in_order():
    shop = await started()
    step = await asyncio.wait_for(shop.step(act(call("meet", order=1), call("meet", order=2))), 60)
    assert [(message.content, message.tool_call_id) for message in step.messages] == [
        ("1", "call_meet"),
        ("2", "call_meet"),
    ]
    assert not step.ended and step.metrics == {"calls": 2, "failed_calls": 0}


async def test_wrong_calls_are_answered_and_the_right_ones_still_run():
    shop = await started()
    step = await shop.step(
        act(
            call("steal"),
            call("look", amount="x"),
            call("look", name="a"),
            call("refuse"),
            ToolCall(name="look", arguments_json="{"),
            ToolCall(name="look", arguments_json='{"\\ud800": 1}'),
            malformed=["not JSON at character 3"],
        )
    )
    assert [message.content for message in step.messages] == [
        "error: no tool 'steal', but look, meet, refuse, crash, wait, buy",
        "error: argument name is missing",
        json.dumps({"name": "a", "price": shop.price}),
        "error: we have none",
        "error: the arguments are not JSON",
        "error: the arguments hold a lone surrogate, which is no text",
        "error: not JSON at character 3",
    ]
    assert {message.role for message in step.messages} == {"tool"}
    assert step.metrics == {"calls": 7, "failed_calls": 6}


async def test_a_bug_costs_the_episode_and_leaves_no_call_running():
    shop = await started()
    with pytest.raises(ZeroDivisionError):
        await shop.step(act(call("wait"), call("look", name="a"), call("crash")))
    assert shop.closed == ["wait"]


async def test_a_cancelled_turn_leaves_no_call_running():
    shop = await started()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(shop.step(act(call("wait"))), 0.05)
    assert shop.closed == ["wait"]


async def test_the_ends():
    assert (await (await started()).step(Action(message=assistant("done")))).reward == 1.0
    bought = await (await started()).step(act(call("buy")))
    assert (bought.reward, bought.terminated, bought.messages[0].content) == (0.5, True, "done")
    late = await started(max_turns=2)
    assert not (await late.step(act(call("refuse")))).ended
    last = await late.step(act(call("refuse")))
    assert (last.reward, last.terminated, len(last.messages)) == (0.0, True, 1)


async def test_the_seed_draws():
    prices = []
    for seed in (1, 1, 2):
        shop = Shop()
        await shop.reset(Task(seed=seed))
        prices.append(shop.price)
    assert prices[0] == prices[1] != prices[2]


def test_a_tool_that_cannot_be_declared_is_refused_with_the_class():
    with pytest.raises(TypeError, match=r"tool .*Wrong.f: x: no JSON schema for bytes"):

        class Wrong(Shop):
            """Is wrong."""

            @tool
            def f(self, x: bytes) -> None:
                """Takes bytes."""


async def test_a_subclass_keeps_replaces_and_drops_tools():
    class Better(Shop):
        """Is better."""

        metric_names = ()
        crash = None  # type: ignore[assignment]

        @tool
        def refuse(self, why: str) -> str:  # type: ignore[override]
            """Says why."""
            return why

        def tools(self) -> list[BoundTool]:
            async def run(arguments_json: str) -> str:
                return arguments_json

            return [*super().tools(), BoundTool(Tool(name="echo"), run)]

    better = Better()
    first = await better.reset(Task())
    assert [record.name for record in first.tools] == ["look", "meet", "refuse", "wait", "buy", "echo"]
    step = await better.step(act(call("refuse", why="no"), call("echo", a=1)))
    assert [message.content for message in step.messages] == ["no", '{"a": 1}']
