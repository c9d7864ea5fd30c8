"""Tools that are HTTP endpoints: what a run's config declares, the policy may call.

The arguments of a call are the JSON body of a POST, or the query of a GET; the answer's text is what the policy reads.
A status below 500 but not 2xx is the policy's own fault and answered as an error. An endpoint that cannot be reached,
or answers 5xx at every attempt, costs the episode: no policy is trained on a service that is down. A POST that may have
been carried out is not sent again, unless the endpoint is said to be `repeatable`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from services.envs.environment import Tool
from services.envs.examination import Examination
from services.envs.http_client import Reply
from services.envs.schema import json_object
from services.envs.tools import BoundTool, ToolError

Method = Literal["GET", "POST"]


@dataclass(frozen=True)
class Endpoint:
    """A tool."""

    name: str
    description: str
    url: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments, an object."""
    method: Method = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = False
    """Whether the same POST twice does no harm, so that one without an answer is sent again, as a GET always is."""


class HttpTools(Examination):
    """Answer tasks with the help of HTTP endpoints."""

    def __init__(self, *, tools: Sequence[Mapping[str, Any]], max_characters: int = 4000, **examination: Any):
        """Raises ValueError for what makes no task.

        Args:
            tools: arguments of Endpoint, one mapping for each tool.
            max_characters: of an answer that the policy is shown; the rest is cut off.
            examination: the arguments of Examination.
        """
        super().__init__(**examination)
        self._endpoints = [Endpoint(**tool) for tool in tools]
        names = {endpoint.name for endpoint in self._endpoints}
        if not names or len(names) < len(self._endpoints) or max_characters < 1:
            raise ValueError("tools must name at least one, each name once, and max_characters be 1 or more")
        for endpoint in self._endpoints:
            if endpoint.method not in get_args(Method) or not endpoint.url.startswith(("http://", "https://")):
                raise ValueError(f"tool {endpoint.name}: method must be GET or POST, url begin with http")
        self._max_characters = max_characters

    def tools(self) -> Sequence[BoundTool]:
        return [self._tool(endpoint) for endpoint in self._endpoints]

    def _tool(self, endpoint: Endpoint) -> BoundTool:
        async def run(arguments_json: str) -> str:
            return self._shown(await self._call(endpoint, json_object(arguments_json)))

        schema = json.dumps(endpoint.parameters)
        return BoundTool(Tool(name=endpoint.name, description=endpoint.description, parameters_json=schema), run)

    async def _call(self, endpoint: Endpoint, arguments: Mapping[str, Any]) -> Reply:
        send, headers = self.shared.send, endpoint.headers
        reply: Reply
        if endpoint.method == "GET":
            query = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
            reply = await send("GET", endpoint.url, query=query, headers=headers)
        else:
            reply = await send("POST", endpoint.url, body=arguments, headers=headers, may_repeat=endpoint.repeatable)
        return reply

    def _shown(self, reply: Reply) -> str:
        """What the policy reads. Raises ToolError for a status that is no success."""
        text = reply.text[: self._max_characters]
        if not 200 <= reply.status < 300:
            raise ToolError(f"status {reply.status}: {text}")
        return text
