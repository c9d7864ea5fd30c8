"""From the name in a run's config to what makes an environment: one of ours, or "module:Class" of anybody's."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import StartupError
from services.envs.environment import Environment

# Import strings, so that a server imports only what it serves.
CATALOG = {
    "calculator": "services.envs.calculator:Calculator",
    "guess_number": "services.envs.guess_number:GuessNumber",
    "gymnasium": "services.envs.toy_text:ToyText",
    "http_tool": "services.envs.http_tool:HttpTools",
    "judge": "services.envs.examination:Examination",
    "mcp": "services.envs.mcp_tools:McpTools",
    "openenv": "services.envs.openenv_proxy:OpenEnv",
    "python_tool": "services.envs.python_tool:PythonTool",
    "reasoning_gym": "services.envs.reasoning:Reasoning",
    "short_answer": "services.envs.short_answer:ShortAnswer",
    "swe_lite": "services.envs.swe_lite:SweLite",
    "tau2": "services.envs.customer_service:CustomerService",
    "textarena": "services.envs.text_games:TextGame",
}
# These need more than the records: the extra of that name brings it.
EXTRAS = frozenset({"gymnasium", "http_tool", "judge", "mcp", "openenv", "reasoning_gym", "tau2", "textarena"})


def find(name: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """What makes the environment of a name with these options.

    Raises StartupError: there is none of that name, or it refuses the options. One object is made to find out.
    """
    make = functools.partial(find_class(name), **options)
    try:
        make()
    except (TypeError, ValueError) as error:
        raise StartupError(f"environment {name} refuses its options {dict(options)}: {error}") from error
    return make


def find_class(name: str) -> type[Environment]:
    """The class of a name. Raises StartupError."""
    address = CATALOG.get(name, name)
    module, colon, attribute = address.partition(":")
    if not colon:
        raise StartupError(f"no environment {name!r}: name one of {', '.join(sorted(CATALOG))}, or module:Class")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        remedy = f"; install headrace[{name.replace('_', '-')}]" if name in EXTRAS else ""
        raise StartupError(f"environment {name} cannot be imported: {error}{remedy}") from error
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise StartupError(f"{address} is no subclass of services.envs.environment.Environment")
    return found
