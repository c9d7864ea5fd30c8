"""reasoning_gym: over a hundred kinds of generated puzzles and their own scorers, alone or mixed.

A task draws its dataset by weight and its question from the dataset; the answer is what the reply has between <answer>
and </answer>, and the dataset's scorer gives the reward, 1 for a right answer and often some share of it for a wrong
one. Both run in worker processes, for some questions take seconds to make. Questions of the split "test" never occur
in "train".

The package's scorers `eval` some answers, directly or through sympy. Such an answer must have the form of one
(answer_form) to reach them. Two datasets have no answer to demonstrate (boxnet, rush_hour), since any that solves the
puzzle is right; of three others it is taken from the metadata. Unevaluated integrals, which intermediate_integration
gives as some of its own answers and takes for any, count as none.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reasoning_gym import factory

from services.envs import answer_form, marked_answer
from services.envs.environment import Action, Environment, Message, Task, TimeStep, assistant, task_random, user

MAX_ANSWER_CHARACTERS = 20_000

# One question in so many, by its text, is kept for the split "test".
TEST_SHARE = 4
# Draws until a question of the split is found; a dataset of very few questions may have none.
MAX_DRAWS = 100

# Datasets whose scorer evaluates the answer, with the form that it must have; anything else is compared as text.
EVALUATED: dict[str, Callable[[str], bool]] = {
    "binary_matrix": answer_form.is_list,
    "countdown": answer_form.is_arithmetic,
    "intermediate_integration": answer_form.is_formula,
    "n_queens": answer_form.is_list,
    "polynomial_multiplication": answer_form.is_formula,
    "puzzle24": answer_form.is_arithmetic,
    "simple_integration": answer_form.is_formula,
    "spiral_matrix": answer_form.is_list,
    "string_insertion": answer_form.is_list,
}
# Datasets without one right answer, and where they keep an example.
EXAMPLES = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}
# Datasets that draw through Python's sets of strings, whose order differs from process to process.
UNORDERED = frozenset({"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note"})


@dataclass(frozen=True)
class Source:
    """One dataset of the mixture."""

    name: str
    weight: float = 1.0
    level: int | None = None
    config_json: str = "{}"


class Reasoning(Environment):
    """Answer generated puzzles of reasoning_gym."""

    splits = {"train": 0, "test": 0}  # noqa: RUF012
    metric_names = ("answered", "correct")

    def __init__(
        self,
        datasets: str | Mapping[str, Mapping[str, Any]] = "chain_sum",
        answer_tag: str = "answer",
        partial_credit: bool = True,
        score_timeout_s: float = 30.0,
    ):
        """Raises ValueError for datasets, levels or settings that do not exist.

        Args:
            datasets: the name of one, or names with their `weight` (1), `level` of its curriculum from 0 (the package's
                own default ranges) and `config` (settings of the dataset, which come before the level's).
            answer_tag: the answer stands in this tag; empty: the whole reply is the answer.
            partial_credit: keep the scorer's shares of 1; else what is not fully right is worth 0.
            score_timeout_s: for one score; an answer that takes longer fails its episode.
        """
        named = {datasets: {}} if isinstance(datasets, str) else datasets
        self._sources = [_source(name, settings or {}) for name, settings in named.items()]
        if not self._sources or not re.fullmatch(r"\w*", answer_tag):
            raise ValueError("datasets must name at least one, and answer_tag be a word")
        self._tag = answer_tag
        self._partial_credit = partial_credit
        self._score_timeout_s = score_timeout_s

    async def reset(self, task: Task) -> TimeStep:
        draw = task_random(task)
        (self._source,) = draw.choices(self._sources, [source.weight for source in self._sources])
        self._entry = await self.blocking(question, self._source, task.split == "test", draw.getrandbits(31))
        form = f"\n\nGive your answer between <{self._tag}> and </{self._tag}>." if self._tag else ""
        return TimeStep([user(f"{self._entry['question']}{form}")])

    async def step(self, action: Action) -> TimeStep:
        answer = self._answer(action.message.content)
        reward = 0.0
        if answer is not None:
            arguments = (self._source, self._entry, answer)
            reward = await self.blocking(score, *arguments, timeout_s=self._score_timeout_s)
        metrics = {"answered": float(answer is not None), "correct": float(reward >= 1)}
        return TimeStep(reward=reward if self._partial_credit else metrics["correct"], terminated=True, metrics=metrics)

    async def demonstrate(self) -> Message | None:
        right = example(self._source.name, self._entry)
        if right is None:
            return None
        return assistant(f"<{self._tag}>{right}</{self._tag}>" if self._tag else right)

    def _answer(self, text: str) -> str | None:
        if not self._tag:
            return text.strip()
        answer = marked_answer.in_tag(text, self._tag)
        return None if answer is None else answer.strip()


@functools.lru_cache(maxsize=256)
def question(source: Source, test: bool, seed: int) -> dict[str, Any]:
    """An entry of the dataset and of the split. Raises RuntimeError where there are too few questions for two."""
    dataset = _dataset(source, seed, MAX_DRAWS)
    for position in range(MAX_DRAWS):
        entry: dict[str, Any] = dataset[position]
        split = zlib.crc32(entry["question"].encode()) % TEST_SHARE == 0
        if split == test and _is_sound(source.name, entry):
            return entry
    raise RuntimeError(f"{source.name} had no question for the split in {MAX_DRAWS}: widen its config or level")


def score(source: Source, entry: Mapping[str, Any], answer: str) -> float:
    """What the dataset's scorer gives for an answer, 0 to 1; an answer that it cannot even read is worth 0."""
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return 0.0
    has_form = EVALUATED.get(source.name)
    if has_form is not None and not has_form(answer):
        also_right = entry["metadata"].get("valid_answers", ())
        return float(answer == entry["answer"] or answer in also_right)
    try:
        return float(_scorer(source).score_answer(answer=answer, entry=entry))
    except Exception:  # noqa: BLE001  # scorers parse the answer in a hundred ways, and some raise for what is no answer
        return 0.0


def example(name: str, entry: Mapping[str, Any]) -> str | None:
    """A right answer of an entry; None where the package keeps none."""
    found = entry["metadata"][EXAMPLES[name]] if name in EXAMPLES else entry["answer"]
    return found if found is None or isinstance(found, str) else json.dumps(found)


def _is_sound(name: str, entry: Mapping[str, Any]) -> bool:
    """Whether the entry's own answer is a closed one."""
    return "Integral" not in (entry["answer"] or "") if name == "intermediate_integration" else True


def _dataset(source: Source, seed: int, size: int) -> Any:
    kind, config_kind = factory.DATASETS[source.name]
    settings = {"seed": seed, "size": size, **json.loads(source.config_json)}
    if source.level is None:
        return kind(config=config_kind(**settings))
    curriculum = factory.create_curriculum(source.name)
    curriculum.set_global_level(source.level)
    config = curriculum.generate_configuration(settings)
    for name, value in settings.items():  # said in the config, it outranks the level
        setattr(config, name, value)
    return kind(config=config)


@functools.lru_cache(maxsize=64)
def _scorer(source: Source) -> Any:
    return _dataset(source, seed=0, size=1)


@functools.lru_cache(maxsize=1024)
def _checked(source: Source) -> Source:
    """The source. Raises ValueError for one that is wrong."""
    if source.name not in factory.DATASETS or source.name == "composite":
        raise ValueError(f"reasoning_gym has no dataset {source.name!r}")
    if source.name in UNORDERED and sys.flags.hash_randomization:
        raise ValueError(
            f"{source.name} draws another question in every process: set PYTHONHASHSEED=0 for the environment's server"
        )
    if not source.weight > 0:
        raise ValueError(f"the weight of {source.name} must be above 0")
    if source.level is not None and (source.level < 0 or source.name not in factory.CURRICULA):
        raise ValueError(f"{source.name} has no curriculum, or no level {source.level}: levels count from 0")
    try:
        _dataset(source, seed=0, size=1)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{source.name} refuses its config {source.config_json}: {error}") from error
    return source


def _source(name: str, settings: Mapping[str, Any]) -> Source:
    unknown = set(settings) - {"weight", "level", "config"}
    if unknown:
        raise ValueError(f"dataset {name}: no setting {sorted(unknown)}, but weight, level and config")
    config_json = json.dumps(settings.get("config", {}), sort_keys=True)
    return _checked(Source(name, settings.get("weight", 1.0), settings.get("level"), config_json))
