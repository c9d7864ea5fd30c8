"""tau2's customer service domains: an agent with a policy, tools and a database, and a customer who wants something.

The customer is scripted, for tau2's own needs a model: it says what it wants and what it knows, then the rest of its
instructions, then agrees to whatever it is asked, and leaves. The agent may end the conversation first, with a tool
that we add. Then tau2's own evaluators, those that need no model, compare the database with the one that the task's
right actions give, and look for what the agent had to say: reward 1 or 0. Conversations that use up their turns are
worth 0, as they are there. Tasks that only a model could judge are left out.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loguru import logger
from tau2.data_model.message import AssistantMessage, ToolCall, ToolMessage, UserMessage
from tau2.data_model.tasks import RewardType
from tau2.data_model.tasks import Task as Scenario
from tau2.evaluator.evaluator_action import ActionEvaluator
from tau2.evaluator.evaluator_communicate import CommunicateEvaluator
from tau2.evaluator.evaluator_env import EnvironmentEvaluator

from services.envs import answer_form, environment
from services.envs.environment import Action, Message, Task, TimeStep, Tool, assistant, user
from services.envs.schema import json_object
from services.envs.tools import BoundTool, ToolEnvironment, ToolError, tool

logger.disable("tau2")  # it tells every answer of every tool, at length

DOMAINS = ("mock", "retail", "airline")

AGREES = "Yes, please go ahead."


class CustomerService(ToolEnvironment):
    """Serve a customer of tau2's mock, retail or airline domain by its policy."""

    metric_names = ("database_right", "said_what_was_due")

    def __init__(self, domain: str = "retail", turns: int = 30, agreements: int = 3):
        """Raises ValueError.

        Args:
            domain: mock, retail or airline.
            turns: of the agent.
            agreements: how often the customer agrees before it leaves.
        """
        if domain not in DOMAINS or turns < 1 or agreements < 0:
            raise ValueError(f"domain must be one of {DOMAINS}, turns 1 or more, agreements 0 or more")
        self._domain = domain
        self._scenarios = scenarios(domain)
        self.splits = {split: len(members) for split, members in self._scenarios.items()}
        self.max_turns = turns
        self._agreements = agreements
        self._conversation: list[Any] = []
        self._parts: dict[str, float] = {}

    async def start(self, task: Task, draw: random.Random) -> Sequence[Message]:
        members = self._scenarios[task.split]
        self._scenario = members[task.index % len(members)]
        self._world = await asyncio.to_thread(_world, self._domain, self._scenario)
        self._script = script(self._scenario, self._agreements)
        self._plan = plan(self._scenario)
        initial = self._scenario.initial_state
        self._conversation = list((initial and initial.message_history) or [])
        opening = next(self._script)
        told = [*map(_shown, self._conversation), user(opening)]
        self._conversation.append(UserMessage(role="user", content=opening))
        return [Message(role="system", content=self._world.get_policy()), *told]

    async def step(self, action: Action) -> TimeStep:
        if action.message.content:
            self._conversation.append(AssistantMessage(role="assistant", content=action.message.content))
        step = await super().step(action)
        return dataclasses.replace(step, metrics={**step.metrics, **self._parts})

    async def answer(self, message: Message) -> TimeStep:
        reply = next(self._script, None)
        if reply is None:
            return TimeStep(reward=await self._reward(), terminated=True)
        self._conversation.append(UserMessage(role="user", content=reply))
        return TimeStep([user(reply)])

    @tool
    async def end_conversation(self) -> None:
        """Ends the conversation, when the customer's request has been dealt with."""
        self.finish(await self._reward())

    def tools(self) -> Sequence[BoundTool]:
        return [*super().tools(), *(self._bound_tool(offered) for offered in self._world.get_tools())]

    async def demonstrate(self) -> Message | None:
        """The task's right actions one by one, then what has to be said and the end; some tasks do not tell them."""
        return next(self._plan, None)

    async def _reward(self) -> float:
        so_far = list(self._conversation)  # calls after this one in its turn come too late
        reward, self._parts = await asyncio.to_thread(_judge, self._domain, self._scenario, so_far)
        return reward

    def _bound_tool(self, offered: Any) -> BoundTool:
        function = offered.openai_schema["function"]

        async def run(arguments_json: str) -> str:
            return self._call(function["name"], json_object(arguments_json))

        record = Tool(
            name=function["name"],
            description=function["description"],
            parameters_json=json.dumps(function["parameters"]),
        )
        return BoundTool(record, run)

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """The answer of one of the domain's tools. Raises ToolError."""
        if name == "calculate" and not answer_form.is_arithmetic(str(arguments.get("expression")), decimals=True):
            raise ToolError("the expression may hold numbers, + - * / and parentheses")  # tau2 would eval 9**9**9
        call = ToolCall(id=f"call_{len(self._conversation)}", name=name, arguments=arguments)
        said: ToolMessage = self._world.get_response(call)
        self._conversation += [AssistantMessage(role="assistant", tool_calls=[call]), said]
        if said.error:
            raise ToolError((said.content or "").removeprefix("Error: "))
        return said.content or ""


def scenarios(domain: str) -> Mapping[str, Sequence[Scenario]]:
    """A domain's tasks by split, without those that only a model could judge; "train" is all where tau2 splits none."""
    return _scenarios(domain)


def script(scenario: Scenario, agreements: int) -> Iterator[str]:
    """What the customer says, one message after the other; it leaves when there is no more."""
    told = scenario.user_scenario.instructions
    if isinstance(told, str):
        yield f'These are my instructions, in which "you" is me. {told}'
    else:
        known = f"\n{told.known_info}" if told.known_info else ""
        yield f'This is my request, in which "you" is me. {told.reason_for_call}{known}'
        yield "\n".join(part for part in (told.task_instructions, told.unknown_info) if part) or AGREES
    for _ in range(agreements):
        yield AGREES


def plan(scenario: Scenario) -> Iterator[Message]:
    """What an expert says and does; nothing where the task does not tell."""
    criteria = scenario.evaluation_criteria
    if criteria is None or criteria.actions is None:
        return
    for number, action in enumerate(criteria.actions):
        if action.requestor == "assistant":
            yield _calling(f"call_{number}", action.name, action.arguments)
    yield _calling("end", "end_conversation", {}, content=". ".join(criteria.communicate_info or []))


def _calling(id: str, name: str, arguments: Mapping[str, Any], content: str = "") -> Message:
    return assistant(content, environment.ToolCall(id=id, name=name, arguments_json=json.dumps(arguments)))


@functools.lru_cache
def _scenarios(domain: str) -> Mapping[str, Sequence[Scenario]]:
    module = importlib.import_module(f"tau2.domains.{domain}.environment")
    splits = module.get_tasks_split()
    if "train" not in splits:
        splits = {"train": splits["base"], **splits}
    by_id = {scenario.id: scenario for scenario in module.get_tasks(None)}
    return {
        split: [by_id[name] for name in names if name in by_id and _can_be_judged(by_id[name])]
        for split, names in splits.items()
    }


def _can_be_judged(scenario: Scenario) -> bool:
    criteria = scenario.evaluation_criteria
    if criteria is None or RewardType.NL_ASSERTION in criteria.reward_basis:
        return False
    return criteria.actions is not None or bool(criteria.env_assertions or criteria.communicate_info)


def _world(domain: str, scenario: Scenario) -> Any:
    """tau2's environment in the task's initial state."""
    world = importlib.import_module(f"tau2.domains.{domain}.environment").get_environment()
    initial = scenario.initial_state
    if initial is not None:
        world.set_state(initial.initialization_data, initial.initialization_actions, initial.message_history or [])
    return world


def _tolerant(domain: str, **arguments: Any) -> Any:
    """tau2's environment, in which an assertion on what is absent does not hold; tau2 raises."""
    world = importlib.import_module(f"tau2.domains.{domain}.environment").get_environment(**arguments)
    holds = world.run_env_assertion

    def check(assertion: Any, raise_assertion_error: bool = True) -> bool:
        try:
            return bool(holds(assertion, raise_assertion_error))
        except ValueError:
            return False

    world.run_env_assertion = check
    return world


def _judge(domain: str, scenario: Scenario, conversation: list[Any]) -> tuple[float, dict[str, float]]:
    """tau2's reward, and its two parts that most tasks have."""
    constructor = functools.partial(_tolerant, domain)
    database = EnvironmentEvaluator.calculate_reward(constructor, scenario, conversation)
    said = CommunicateEvaluator.calculate_reward(scenario, conversation)
    parts = [database]
    basis = scenario.evaluation_criteria.reward_basis
    if RewardType.COMMUNICATE in basis:
        parts.append(said)
    if RewardType.ACTION in basis:
        parts.append(ActionEvaluator.calculate_reward(scenario, conversation))
    reward = 1.0
    for part in parts:
        reward *= part.reward
    return reward, {"database_right": database.reward, "said_what_was_due": said.reward}


def _shown(message: Any) -> Message:
    """A message of tau2's as ours."""
    calls = [
        environment.ToolCall(id=call.id, name=call.name, arguments_json=json.dumps(call.arguments))
        for call in getattr(message, "tool_calls", None) or []
    ]
    call_id = message.id if isinstance(message, ToolMessage) else ""
    return Message(role=message.role, content=message.content or "", tool_calls=calls, tool_call_id=call_id)
