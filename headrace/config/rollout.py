"""Section `rollout`: the gateways."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from headrace.config.section import Count, Seconds, Section


class Rollout(Section):
    """The gateways."""

    replicas: Count = Field(1, description="gateways that `headrace run` starts")
    group_size: int = Field(ge=2, description="episodes of one task whose rewards are compared; at least 2")
    max_concurrent_episodes: Count = 256
    temperature: float = Field(1.0, gt=0, description="softmax temperature of training episodes")
    evaluation_temperature: float = Field(1.0, ge=0, description="softmax temperature of evaluation, 0 is greedy")
    max_action_tokens: Count = Field(description="tokens of one action at the most")
    max_episode_tokens: Count = Field(description="tokens of a whole episode at the most, observations included")
    tool_parser: Literal["none", "hermes", "llama3_json", "pythonic", "xml"] = Field(
        "none",
        description="how the model writes tool calls: hermes (Qwen2.5, Qwen3, Hermes), llama3_json (Llama 3),"
        " pythonic (Llama 4, Gemma), xml (Qwen3-Coder); none: it calls no tools",
    )
    thinking: Literal["apart", "content"] = Field(
        "apart",
        description="where <think>…</think> at the start of an action goes in the message that the environment gets:"
        " its field `thinking`, or the content, for an environment that judges the form; the tokens keep it always",
    )
    episode_timeout_s: Seconds = 600.0
    group_timeout_s: Seconds = Field(1800.0, description="stragglers of a group are cancelled after it")
    episode_attempts: Count = Field(3, description="environment sessions that one episode may take")
    engine_timeout_s: Seconds = Field(120.0, description="deadline of one engine call")
    engine_attempts: Count = Field(8, description="engine calls of one action that may fail")
    engine_window_least: Count = Field(1, description="calls that a gateway keeps at an engine under pressure")
    engine_window_first: Count = Field(256, description="calls that a gateway sends to an engine that it does not know")
    engine_window_most: Count = Field(4096, description="calls that a gateway keeps at an engine at the most")
    engine_circuit_failures: Count = Field(
        5, description="calls that fail in a row before an engine is left alone for a while"
    )
    engine_circuit_longest_s: Seconds = Field(
        30.0,
        description="longest time that a failing engine is left alone; the first is 0.5 s, each next twice that",
    )
    claim_timeout_s: Seconds = Field(30.0, description="silence after which another gateway takes a ticket over")
    max_unpublished_groups: Count = Field(64, description="ended groups held while Redis is away")
    drain_timeout_s: Seconds = Field(10.0, description="how long SIGTERM waits for groups to end; others take the rest")

    @model_validator(mode="after")
    def _group_fits(self) -> Rollout:
        if self.max_concurrent_episodes < self.group_size:
            raise ValueError("max_concurrent_episodes must be at least group_size, or no group could start")
        if not self.engine_window_least <= self.engine_window_first <= self.engine_window_most:
            raise ValueError("engine_window_least, engine_window_first and engine_window_most must not descend")
        return self
