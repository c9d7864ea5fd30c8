"""What code that a model wrote may try, and which strength of sandbox claims to stop it.

The red-team tests try each claim on each strength, and docs/sandbox.md shows this table.
"""

from __future__ import annotations

import enum


class Strength(enum.Enum):
    """How a sandbox isolates."""

    MONTY = "monty"
    PROCESS = "process"
    CONTAINER = "container"


class Hazard(enum.Enum):
    """What is stopped: it fails, or ends with the sandbox, and nothing outside has noticed."""

    FORK_BOMB = "Starting processes without end"
    MEMORY_BOMB = "Taking memory without end"
    ENDLESS_OUTPUT = "Writing without end"
    DESCRIPTOR_LEAK = "Opening files without end, or using those of the server"
    NETWORK = "Reaching the network, this machine's own included"
    OUTSIDE_FILES = (
        "Reading files outside the scratch directory: /etc/passwd, our source, another process's environment"
    )
    SYMLINK_ESCAPE = "Reading or writing outside through a symbolic link"
    SIGNALS = "Signals to the server or to another sandbox"
    ZOMBIES = "Leaving dead children, or orphans in a session of their own"
    DEADLINE = "Sleeping or computing past the deadline, with all signals ignored"
    PICKLE = "A pickle that runs a program when it is loaded"
    FULL_SCRATCH = "Filling the disk, by one file, by many or by an archive that unpacks to more"
    ODD_TEXT = "NUL bytes, lone surrogates and bytes that are no UTF-8 in code and output"
    PRIVILEGES = "Gaining rights: set-user-id programs, new namespaces, tracing, mounts"
    SECRETS = "Reading the server's environment variables"


ALL = frozenset(Hazard)

CLAIMS: dict[Strength, frozenset[Hazard]] = {
    Strength.MONTY: ALL,
    Strength.PROCESS: ALL,
    Strength.CONTAINER: ALL,
}


def table() -> str:
    """The claims as a table in Markdown, for docs/sandbox.md."""
    rows = ["| what a program tries | " + " | ".join(f"`{strength.value}`" for strength in Strength) + " |"]
    rows.append("|---|" + "---|" * len(Strength))
    for hazard in Hazard:
        marks = ["stopped" if hazard in CLAIMS[strength] else "**not stopped**" for strength in Strength]
        rows.append(f"| {hazard.value} | " + " | ".join(marks) + " |")
    return "\n".join(rows) + "\n"
