"""Tools of any MCP server, started for each episode or reached over HTTP, become the episode's tools.

A server that dies, or does not answer a call in time, costs the episode and is no reward; a tool that reports an error
is answered, for that is the policy's fault. Each episode has a session of its own: over stdio a process of its own,
which a second is gone for starting, over HTTP whatever state the server keeps by session.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

import httpx
from mcp import ClientSession, McpError, StdioServerParameters, types
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from headrace import child
from services.envs.environment import Task, TimeStep, Tool
from services.envs.examination import Examination
from services.envs.schema import json_object
from services.envs.tools import BoundTool, ToolError


class ServerLost(Exception):
    """The MCP server is gone, or does not answer."""


class Session:
    """One connection to an MCP server.

    A task of its own holds it: the SDK's scopes must be left by the task that entered them, and an episode's calls come
    from several.
    """

    def __init__(self, transport: contextlib.AbstractAsyncContextManager[Any], timeout_s: float):
        self._transport = transport
        self._timeout_s = timeout_s
        self._end = asyncio.Event()
        self._opened: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold())

    async def tools(self) -> Sequence[types.Tool]:
        """All that the server offers. Raises ServerLost."""
        session = await self._until_lost(self._ready())
        found: list[types.Tool] = []
        cursor: str | None = None
        while True:
            page = await self._until_lost(session.list_tools(params=types.PaginatedRequestParams(cursor=cursor)))
            found += page.tools
            cursor = page.nextCursor
            if cursor is None:
                return found

    async def call(self, name: str, arguments: dict[str, Any]) -> types.CallToolResult:
        """The tool's result. Raises ServerLost, and ToolError for what the server refuses."""
        session = await self._ready()
        try:
            return await self._until_lost(session.call_tool(name, arguments))
        except McpError as error:
            raise ToolError(error.error.message) from error

    async def close(self) -> None:
        """Ends the session, and with it a process that was started for it."""
        self._end.set()
        if not self._opened.done():
            self._holder.cancel()
        await asyncio.gather(self._holder, return_exceptions=True)

    async def _hold(self) -> None:
        async with self._transport as (read, write, *_), ClientSession(read, write) as session:
            await session.initialize()
            self._opened.set_result(session)
            await self._end.wait()

    async def _ready(self) -> ClientSession:
        return await asyncio.shield(self._opened)

    async def _until_lost[T](self, request: Coroutine[Any, Any, T]) -> T:
        """The answer, unless time or connection ends first. Raises ServerLost, and McpError for a server's refusal."""
        asking = asyncio.create_task(request)
        try:
            await asyncio.wait({asking, self._holder}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                gone = self._holder.done()
                raise ServerLost(self._reason() if gone else f"the MCP server gave no answer in {self._timeout_s:g} s")
            return asking.result()
        except McpError as error:
            if error.error.code == types.CONNECTION_CLOSED:
                raise ServerLost("the MCP server closed the connection") from error
            raise
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    def _reason(self) -> str:
        error = None if self._holder.cancelled() else self._holder.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return f"the MCP server is lost: {type(error).__name__}: {error}" if error else "the MCP server is lost"


class McpTools(Examination):
    """Answer tasks with the tools of an MCP server."""

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        url: str = "",
        headers: Mapping[str, str] | None = None,
        only: Sequence[str] = (),
        call_timeout_s: float = 30.0,
        max_characters: int = 4000,
        **examination: Any,
    ):
        """Raises ValueError for what makes no task.

        Args:
            command: starts a server that speaks over its standard input and output; or
            url: of one that speaks streamable HTTP, with `headers`.
            environment: variables of the started server, which else has PATH, HOME and their like.
            only: names of the tools to offer; empty: all.
            call_timeout_s: for one call, and for the server's start.
            max_characters: of an answer that the policy is shown; the rest is cut off.
            examination: the arguments of Examination.
        """
        super().__init__(**examination)
        if bool(command) == bool(url) or isinstance(command, str):
            raise ValueError("set either command, a list of words, or url")
        if call_timeout_s <= 0 or max_characters < 1:
            raise ValueError("call_timeout_s must be above 0, max_characters 1 or more")
        self._command, self._environment = list(command), dict(environment or {})
        self._url, self._headers = url, dict(headers or {})
        self._only = frozenset(only)
        self._call_timeout_s = call_timeout_s
        self._max_characters = max_characters
        self._session: Session | None = None
        self._offered: Sequence[types.Tool] = ()

    async def reset(self, task: Task) -> TimeStep:
        self._session = Session(self._transport(), self._call_timeout_s)
        offered = await self._session.tools()
        absent = self._only - {tool.name for tool in offered}
        if absent:
            raise ServerLost(f"the MCP server has no tool {', '.join(sorted(absent))}")
        self._offered = [tool for tool in offered if not self._only or tool.name in self._only]
        return await super().reset(task)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def tools(self) -> Sequence[BoundTool]:
        return [self._tool(offered) for offered in self._offered]

    def _tool(self, offered: types.Tool) -> BoundTool:
        async def run(arguments_json: str) -> str:
            assert self._session is not None
            return self._shown(await self._session.call(offered.name, json_object(arguments_json)))

        schema = json.dumps(offered.inputSchema)
        return BoundTool(Tool(name=offered.name, description=offered.description or "", parameters_json=schema), run)

    def _shown(self, result: types.CallToolResult) -> str:
        """What the policy reads: the texts, and of anything else its kind. Raises ToolError where the tool failed."""
        parts = [part.text if isinstance(part, types.TextContent) else f"[{part.type}]" for part in result.content]
        text = "\n".join(parts)[: self._max_characters]
        if result.isError:
            raise ToolError(text)
        return text

    @contextlib.asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        if self._command:
            # By way of a program that has it die with us: one that is busy does not notice the end of its input.
            arguments = ["-P", child.__file__, str(os.getpid()), *self._command]
            server = StdioServerParameters(command=sys.executable, args=arguments, env=self._environment)
            async with stdio_client(server) as streams:
                yield streams
        else:
            client = httpx.AsyncClient(headers=self._headers, timeout=httpx.Timeout(self._call_timeout_s))
            async with client, streamable_http_client(self._url, http_client=client) as streams:
                yield streams
