"""SGLang's own HTTP application (chat completions and the rest), served by this engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from sgl_jax.srt.entrypoints import http_server
from sgl_jax.srt.managers.detokenizer_manager import DetokenizerManager
from sgl_jax.srt.managers.template_manager import TemplateManager
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager
from sgl_jax.srt.server_args import PortArgs, ServerArgs

from services.inference.scheduler import VersionedScheduler


@contextlib.asynccontextmanager
async def stock_application(
    server_args: ServerArgs, ports: PortArgs, scheduler: VersionedScheduler, died: Callable[[str], None]
) -> AsyncIterator[Any]:
    """The application, while the body runs. `died` is called when it answers no more."""
    detokenizer = await asyncio.to_thread(DetokenizerManager, server_args, ports)
    threading.Thread(target=detokenizer.event_loop, name="detokenizer", daemon=True).start()
    tokenizer = TokenizerManager(server_args, ports)
    tokenizer.max_req_input_len = scheduler.max_req_input_len
    # Its own start of the loop would also take over this process's signals.
    tokenizer.no_create_loop = True
    templates = TemplateManager()
    templates.initialize_templates(model_path=server_args.model_path)
    http_server.set_global_state(
        http_server._GlobalState(tokenizer_manager=tokenizer, template_manager=templates, scheduler_info={})
    )
    http_server.app.server_args = server_args
    replies = asyncio.create_task(tokenizer.handle_loop())
    replies.add_done_callback(
        lambda task: None if task.cancelled() else died(f"the stock API answers no more: {task.exception()!r}")
    )
    try:
        async with http_server.lifespan(http_server.app):
            yield http_server.app
    finally:
        replies.cancel()
