"""Coroutines of environments and rewards, run on one event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable
from functools import cache
from typing import Any


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Started when first needed; a daemon, so that a run that ends never waits for it. A notebook's own loop is left alone."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="teamtr-lora-async", daemon=True).start()
    return loop


def as_future(answer: Any) -> Any:
    """A coroutine as a Future that is already running; anything else as it is."""
    return asyncio.run_coroutine_threadsafe(_awaited(answer), _loop()) if inspect.isawaitable(answer) else answer


async def _awaited(answer: Awaitable[Any]) -> Any:
    try:
        return await answer
    except SystemExit as stop:  # it would end the loop, and whoever waits for the answer would wait forever
        raise RuntimeError(f"it called sys.exit({'' if stop.code is None else repr(stop.code)})") from stop
