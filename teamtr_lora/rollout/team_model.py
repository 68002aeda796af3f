"""ASGI middleware by which a vLLM server offers the whole team as a model: one chat request plays the protocol.

`serve` adds it by vLLM's own `--middleware`. A POST to /v1/chat/completions with the model `team` is answered here: the agents
speak in turn, those of a blind round at once, each by a request to the server's own /v1/completions, with the tokens that
training would have sent. The content of the answer is the team's answer; what the agents said is its reasoning. Everything else
goes through to vLLM as it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
import uuid
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from teamtr_lora.base.frozen_base import load_tokenizer
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe
from teamtr_lora.rollout.asgi import (
    App,
    InnerRequest,
    Receive,
    RefusedError,
    Scope,
    Send,
    again,
    events,
    gone,
    send_json,
    whole_body,
)
from teamtr_lora.rollout.collector import next_requests
from teamtr_lora.rollout.sampler import Request, derive_seed
from teamtr_lora.rollout.server_client import completion_body
from teamtr_lora.tasks import AskedTask, Item, Task
from teamtr_lora.team import Episode, Message, Team, Transcript, build_team

TEAM = "TEAMTR_LORA_TEAM"  # environment variable: what `served_team` made
CHAT, MODELS, COMPLETIONS = "/v1/chat/completions", "/v1/models", "/v1/completions"
LONGEST_BODY = 4 << 20
LONGEST_SETTINGS = 100_000  # a Linux process takes 128 KiB in one variable


def served_team(recipe: Recipe, folder: Path, base: str, *, context_tokens: int, end_ids: tuple[int, ...]) -> dict[str, str]:
    """What the middleware needs to know, as environment variables. `folder` is the base's, `base` its name on the server."""
    values = {"recipe": recipe.model_dump(mode="json"), "recipe_folder": str(recipe.folder.resolve()), "folder": str(folder)}
    text = json.dumps(values | {"base": base, "context_tokens": context_tokens, "end_ids": end_ids})
    if len(text) > LONGEST_SETTINGS:
        raise UserError(
            f"the recipe is {len(text)} characters long, more than serve can pass on; shorten its roles and system text"
        )
    return {TEAM: text}


def team_name(agents: list[str]) -> str:
    """The model's name: `team`, unless an agent is called so."""
    return "team" if "team" not in agents else "whole-team"


def _refused(message: str) -> RefusedError:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    return RefusedError(400, json.dumps({"error": error}).encode())


@dataclass(frozen=True)
class _Ask:
    """A chat request, checked."""

    question: str
    temperature: float
    max_tokens: int
    seed: int
    stream: bool
    usage_at_end: bool


class TeamModel:
    def __init__(self, app: App) -> None:
        self.app = app
        settings = json.loads(os.environ[TEAM])
        self._recipe = Recipe.model_validate(settings["recipe"])
        self._base, self._context = settings["base"], settings["context_tokens"]
        self._folder, self._recipe_folder = Path(settings["folder"]), Path(settings["recipe_folder"])
        self._end_ids = tuple(settings["end_ids"])
        self._team: Team | None = None
        self.name = team_name([agent.name for agent in self._recipe.team.agents])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and scope["method"] == "GET" and path == MODELS:
            await self._list_models(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "POST" and path == CHAT:
            await self._chat(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _list_models(self, scope: Scope, receive: Receive, send: Send) -> None:
        inner = InnerRequest(self.app, {**scope}, b"")
        body = b"".join([part async for part in inner.body()])
        if inner.status == 200:
            listed = json.loads(body)
            # with a parent, as adapters have: the base is the one model that has none
            card = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "teamtr-lora"}
            listed["data"].append(card | {"root": self.name, "parent": self._base, "max_model_len": self._context})
            body = json.dumps(listed).encode()
        await send_json(send, inner.status, body)

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await whole_body(receive)
        try:
            asked = json.loads(body) if body is not None and len(body) <= LONGEST_BODY else None
        except ValueError:
            asked = None
        if not isinstance(asked, dict) or asked.get("model") != self.name:
            await self.app(scope, again(body, receive), send)  # vLLM's own models, and what is no request at all
            return
        playing = asyncio.ensure_future(self._answer(scope, asked, send))
        leaving = asyncio.ensure_future(gone(receive))
        await asyncio.wait((playing, leaving), return_when=asyncio.FIRST_COMPLETED)
        for task in (playing, leaving):
            task.cancel()  # a client that left is not played for
        with contextlib.suppress(asyncio.CancelledError):
            await playing

    async def _answer(self, scope: Scope, asked: dict[str, Any], send: Send) -> None:
        reply = _Reply(send, self.name)
        try:
            ask = self._checked(asked)
            team = await asyncio.to_thread(self._ready)
            await asyncio.to_thread(lambda: self._reader)
            reply.stream, reply.usage_at_end = ask.stream, ask.usage_at_end
            await self._play(team, scope, ask, reply)
        except RefusedError as refused:
            await reply.fail(refused.status, refused.body)
        except UserError as error:
            await reply.fail(400, _refused(str(error)).body)

    async def _play(self, team: Team, scope: Scope, ask: _Ask, reply: _Reply) -> None:
        reader = self._reader
        episode = Episode(item_id="question", group=0, prompt=ask.question, seed=ask.seed, item=Item("question", ask.question))
        transcript = team.protocol.begin(ask.question)
        while requests := _next_requests(team, transcript, episode, ask):
            spoken = [_Spoken(self.app, scope, request) for request in requests]  # all are being sampled from now on
            try:
                for request, message in zip(requests, spoken, strict=True):
                    await reply.reasoning(f"\n\n{request.agent}: " if episode.messages else f"{request.agent}: ")
                    token_ids, finish = await message.heard_by(reply)
                    text = transcript.add_message(request.agent, token_ids)
                    episode.messages.append(
                        Message(agent=request.agent, turn=len(episode.messages), prompt_ids=request.prompt_ids,
                                token_ids=token_ids, sampler_logprobs=[], version="",
                                finish="length" if finish == "length" else "stop", text=text)
                    )  # fmt: skip
            finally:  # also for a client that has left; a failure that nobody asked for is then not complained of
                for message in spoken:
                    message.cancel()
        episode.answer_turn = team.answer_turn(episode, AskedTask(reader).vote)
        await reply.finish(reader.team_answer(episode), episode)

    @cached_property
    def _reader(self) -> Task:
        return self._recipe.task.voting_reader(self._recipe_folder, votes=self._recipe.team.router.votes)

    def _ready(self) -> Team:
        """The team's protocol, made when it is first asked."""
        if self._team is None:
            tokenizer, code = load_tokenizer(self._folder, self._base), self._recipe_folder
            self._team = build_team(
                self._recipe.team, tokenizer, base_context_tokens=self._context, code=code, end_ids=self._end_ids
            )
        return self._team

    def _checked(self, asked: dict[str, Any]) -> _Ask:
        rollout = self._recipe.rollout
        if asked.get("n") not in (None, 1):
            raise _refused(f"n = {asked['n']}: a team gives one answer to a request; send several requests")
        if asked.get("tools"):
            raise _refused("tools: the team's protocol says which tools it has; leave tools out")
        given = asked.get("temperature")
        temperature = rollout.temperature if given is None else given
        most = asked.get("max_completion_tokens") or asked.get("max_tokens") or rollout.max_message_tokens
        if not isinstance(temperature, (int, float)) or not 0 <= temperature < float("inf"):
            raise _refused(f"temperature = {temperature!r}: must be 0 or a positive number")
        if not isinstance(most, int) or most < 1:
            raise _refused(f"max_tokens = {most!r}: must be a positive whole number")
        seed = asked.get("seed")
        options = asked.get("stream_options") or {}
        return _Ask(
            question=_question(asked.get("messages")),
            temperature=float(temperature),
            max_tokens=min(most, rollout.max_message_tokens),
            seed=derive_seed("chat", seed if isinstance(seed, int) else uuid.uuid4().hex),
            stream=bool(asked.get("stream")),
            usage_at_end=bool(options.get("include_usage")) if isinstance(options, dict) else False,
        )


def _next_requests(team: Team, transcript: Transcript, episode: Episode, ask: _Ask) -> list[Request]:
    """The next speaker's, or those of a blind round; none where the episode is over, or the context is full."""
    found: list[Request] = []
    for request in next_requests(team, transcript, episode, ask.temperature, ask.max_tokens):
        read = len(request.prompt_ids)
        if read >= team.context_tokens and not (episode.messages or found):
            raise _refused(f"the question takes {read} tokens, the context is {team.context_tokens}")
        if read >= team.context_tokens:
            break
        found.append(request)
    return found


def _question(messages: Any) -> str:
    """The conversation as one text: a single message is its own text, turns of a longer one are named."""
    if not isinstance(messages, list) or not messages or not all(isinstance(turn, dict) for turn in messages):
        raise _refused("messages: must be a list of messages, each with a role and a content")
    turns: list[tuple[str, str]] = []
    for turn in messages:
        content = turn.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        if not isinstance(content, str):
            raise _refused(f"messages: the content of a message is {type(content).__name__}; a team reads text")
        turns.append((str(turn.get("role", "user")), content))
    if all(role != "assistant" for role, _ in turns):
        return "\n\n".join(text for _, text in turns)
    return "\n\n".join(f"{role}: {text}" for role, text in turns)


class _Reply:
    """The answer on its way to the client: whole, or in pieces as OpenAI streams them."""

    def __init__(self, send: Send, model: str) -> None:
        self._send, self._model = send, model
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self._said: list[str] = []
        self._begun = False
        self.stream = self.usage_at_end = False

    async def reasoning(self, text: str) -> None:
        if not text:
            return
        self._said.append(text)
        if self.stream:
            # vLLM and OpenAI's client call it `reasoning`, others `reasoning_content`
            await self._chunk({"reasoning": text, "reasoning_content": text})

    async def finish(self, answer: str, episode: Episode) -> None:
        sampled = episode.tokens
        read = sum(len(message.prompt_ids) for message in episode.messages)
        usage = {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}
        answering = episode.answer_message
        finish = "length" if answering is not None and answering.truncated else "stop"
        if not self.stream:
            said = "".join(self._said)
            message = {"role": "assistant", "content": answer, "reasoning": said, "reasoning_content": said}
            choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
            whole = {**self._head("chat.completion"), "choices": [choice], "usage": usage}
            await send_json(self._send, 200, whole)
            return
        await self._chunk({"content": answer})
        await self._chunk({}, finish)
        if self.usage_at_end:
            await self._event({**self._head("chat.completion.chunk"), "choices": [], "usage": usage})
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def fail(self, status: int, body: bytes) -> None:
        if self._begun:
            await self._send({"type": "http.response.body", "body": b"data: " + body + b"\n\ndata: [DONE]\n\n"})
        else:
            await send_json(self._send, status, body)

    async def _chunk(self, delta: dict[str, str], finish: str | None = None) -> None:
        if not self._begun:
            self._begun = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            delta = {"role": "assistant", **delta}
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        await self._event({**self._head("chat.completion.chunk"), "choices": [choice]})

    async def _event(self, value: dict[str, Any]) -> None:
        body = f"data: {json.dumps(value)}\n\n".encode()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}


class _Spoken:
    """One message, from the server's own completions: sampled at once, and passed on when it is its turn to be heard."""

    def __init__(self, app: App, scope: Scope, request: Request) -> None:
        body = {**completion_body(request, request.agent), "stream": True}
        for unused in ("logprobs", "return_tokens_as_token_ids"):
            del body[unused]
        self._inner = InnerRequest(
            app, {**scope, "path": COMPLETIONS, "raw_path": COMPLETIONS.encode(), "query_string": b""}, body
        )
        self._texts: asyncio.Queue[str | None] = asyncio.Queue()
        self._sampling = asyncio.ensure_future(self._sample())

    async def heard_by(self, reply: _Reply) -> tuple[list[int], str]:
        while (text := await self._texts.get()) is not None:
            await reply.reasoning(text)
        return await self._sampling

    def cancel(self) -> None:
        self._sampling.cancel()

    async def _sample(self) -> tuple[list[int], str]:
        token_ids: list[int] = []
        finish, whole = "stop", b""
        try:
            async for event in events(self._inner.body()):
                if self._inner.status != 200 or b'"error"' in event[:12]:
                    whole += event
                    continue
                choice = (json.loads(event).get("choices") or [{}])[0]
                token_ids += choice.get("token_ids") or []
                finish = choice.get("finish_reason") or finish
                await self._texts.put(choice.get("text") or "")
        finally:
            self._texts.put_nowait(None)
        if self._inner.status != 200 or whole:
            raise RefusedError(self._inner.status if self._inner.status != 200 else 500, whole)
        return token_ids, finish
