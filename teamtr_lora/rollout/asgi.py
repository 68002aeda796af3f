"""What ASGI middleware needs: the types of a call, JSON answers and refusals, requests to its own server, bodies it has read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RefusedError(Exception):
    """The request is answered with this status and this JSON."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status, self.body = status, body


async def send_json(send: Send, status: int, answer: dict[str, Any] | bytes) -> None:
    """Answers a request; bytes are JSON already."""
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class InnerRequest:
    """A request to the server itself, in this process; `status` is known when the body begins."""

    def __init__(self, app: App, scope: Scope, body: Any) -> None:
        self._app, self._scope, self.status = app, scope, 500
        self._body = body if isinstance(body, bytes) else json.dumps(body).encode()
        own = (b"content-length", b"content-type", b"accept-encoding", b"transfer-encoding")
        headers = [(key, value) for key, value in scope["headers"] if key.lower() not in own]
        described = [(b"content-type", b"application/json"), (b"content-length", str(len(self._body)).encode())]
        self._scope["headers"] = headers + described

    async def body(self) -> AsyncIterator[bytes]:
        parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if asked:
                await asyncio.Event().wait()  # the client is still there: only cancelling ends this
            asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.status = int(message["status"])
            elif message["type"] == "http.response.body":
                await parts.put(message.get("body", b""))

        async def run() -> None:
            try:
                await self._app(self._scope, receive, send)
            finally:
                await parts.put(None)

        running = asyncio.ensure_future(run())
        try:
            while (part := await parts.get()) is not None:
                yield part
            await running
        finally:
            running.cancel()


async def events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events; an answer that is none comes whole."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                yield line[5:].strip()
    if rest.strip():
        yield rest.strip()


async def whole_body(receive: Receive) -> bytes | None:
    """None where the client left before it had sent everything."""
    body = b""
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            return None
        body += event.get("body", b"")
        if not event.get("more_body", False):
            return body


def again(body: bytes | None, receive: Receive) -> Receive:
    """A body that was read already, for whoever reads it next."""
    waiting = [{"type": "http.disconnect"} if body is None else {"type": "http.request", "body": body, "more_body": False}]

    async def once() -> Any:
        return waiting.pop() if waiting else await receive()

    return once


async def gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
