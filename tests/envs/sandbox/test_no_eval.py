"""No environment or grader evaluates text that may be a model's."""

import ast
from pathlib import Path

import services.envs.environment

PACKAGE = Path(services.envs.environment.__file__).parent
# The one that runs inside the sandbox, where running code is its work.
INSIDE = PACKAGE / "sandbox" / "interpreter.py"
# A server and its own worker processes, which run an environment author's functions and nothing of a model's.
PICKLES = {"worker.py", "blocking.py"}


def test_nothing_is_evaluated_outside_a_sandbox():
    banned = {"eval", "exec", "compile", "__import__", "execfile"}
    modules = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    offences = []
    for path in PACKAGE.rglob("*.py"):
        if path == INSIDE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = {node.id} & banned if isinstance(node, ast.Name) else set()
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names} & modules
            if isinstance(node, ast.ImportFrom):
                names |= {node.module} & modules
            if path.name in PICKLES:
                names -= {"pickle"}
            offences += [(path.name, node.lineno, name) for name in names]
    assert not offences
