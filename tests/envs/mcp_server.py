"""A small real MCP server: `python -m tests.envs.mcp_server` over stdio, with a port over streamable HTTP."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.fastmcp import FastMCP

PORT = int(sys.argv[1]) if len(sys.argv) > 1 else 0
server = FastMCP("sums", host="127.0.0.1", port=PORT, log_level="ERROR")
kept: list[int] = []


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def keep(number: int) -> str:
    """Keeps a number; tells all that are kept."""
    kept.append(number)
    return str(kept)


@server.tool()
def variable(name: str) -> str:
    """An environment variable."""
    return os.environ.get(name, "")


@server.tool()
def divide(a: int, b: int) -> str:
    """Divides."""
    return str(a / b)


@server.tool()
def crash() -> str:
    """Ends the process."""
    os._exit(1)


@server.tool()
def sleep() -> str:
    """Takes longer than anybody waits."""
    time.sleep(600)
    return "awake"


if __name__ == "__main__":
    server.run(transport="streamable-http" if PORT else "stdio")
