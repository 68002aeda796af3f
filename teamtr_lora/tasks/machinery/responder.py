"""Who answers the team: one interface for suspects, referees and customers.

`ask` returns what the task makes of the reply, or a future of it: an endpoint's replies come in parallel, while the collector
plays on.
"""

from __future__ import annotations

import json
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import SERVER_URL, ApiKeyVariable, DataFile, OnThisMachine, Section, Text, api_key, refuse
from teamtr_lora.tasks.machinery.bench import BenchTask
from teamtr_lora.tasks.machinery.data_files import read_rows
from teamtr_lora.tasks.machinery.task_settings import ItemSource, data_file
from teamtr_lora.team.protocol import without_reasoning

T = TypeVar("T")
Turn = dict[str, str]  # role (system, user, assistant) and content, as the API has them

CONNECT_SECONDS = 10.0
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
MOST_BYTES = 4_000_000  # of one answer
CHARACTERS_PER_TOKEN = 8  # a reply longer than its tokens could be is cut

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


class ResponderSettings(Section):
    """Suspects, a referee or a customer, played by a model behind an OpenAI-compatible server, or by a file of replies."""

    url: Annotated[Annotated[str, Field(pattern=SERVER_URL)] | None, OnThisMachine("choice")] = Field(
        default=None,
        description="Address of any OpenAI-compatible server, such as http://localhost:8000/v1. Give either url or script.",
    )
    model: Annotated[Text | None, OnThisMachine("path or name")] = Field(
        default=None, description="Model to ask; null takes the first that the server lists."
    )
    script: Annotated[DataFile | None, OnThisMachine("file")] = Field(
        default=None,
        description="File of replies instead of a server, relative to the recipe: rows {when, reply}; the first whose `when` is "
        "in what was said, or that has none, answers.",
    )
    api_key_variable: Annotated[ApiKeyVariable, OnThisMachine("choice")] = Field(
        default="RESPONDER_API_KEY",
        description="Environment variable that holds the server's API key, if it asks for one; its name ends in API_KEY.",
    )
    timeout_seconds: float = Field(default=120.0, gt=0, description="Longest wait for one reply, in seconds.")
    retries: int = Field(default=4, ge=0, description="Further tries when the server fails or is busy, after growing pauses.")
    requests: int = Field(default=32, ge=1, description="Most requests in flight at a time.")
    context_characters: int = Field(
        default=40_000,
        ge=1000,
        description="Longest conversation that is sent, in characters; beyond it the oldest turns are left out, so that one that "
        "goes on and on does not overflow the model's context.",
    )
    max_tokens: int = Field(default=256, ge=1, description="Longest reply in tokens.")
    temperature: float = Field(default=0.7, ge=0, description="The responder's sampling temperature.")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.url is not None and self.script is not None:
            refuse("responder", [(("script",), self.script, "url is given too, and one of them answers", "keep either")])
        return self


class ConversationSettings(ItemSource):
    """Tasks in which the team talks to somebody outside it."""

    replies: ClassVar[str] = "task.responder"

    responder: ResponderSettings = Field(default_factory=ResponderSettings, description="Who answers the team.")


class Responder:
    """Plays one side of a conversation. `turns` are that side's view: its system text, what it was told, what it said."""

    live = True  # somebody is there: an episode may be expected to end by their word

    def ask(self, turns: Sequence[Turn], then: Callable[[str], T]) -> T | Future[T]:
        """`then` makes what is wanted of the reply, which may be empty but is never too long."""
        raise TypeError(f"{type(self).__name__} answers nothing")


class Silent(Responder):
    """Nobody: scores messages that were recorded, where the replies to them no longer matter."""

    live = False

    def ask(self, turns: Sequence[Turn], then: Callable[[str], T]) -> T:
        return then("")


class Scripted(Responder):
    """Replies by a rule, at once; the same turns always get the same reply."""

    def __init__(self, say: Callable[[Sequence[Turn]], str]) -> None:
        self._say = say

    def ask(self, turns: Sequence[Turn], then: Callable[[str], T]) -> T:
        return then(tidy(self._say(turns), MOST_BYTES))


class ConversationTask(BenchTask):
    """A task in which somebody outside the team, the responder, answers it."""

    needs_every_message = True

    def __init__(self, responder: Responder) -> None:
        self.responder = responder

    def use_recorded(self) -> None:
        self.responder = Silent()

    def check_playable(self) -> None:
        if not self.responder.live:
            raise UserError(
                f"task.responder: {self.name} is a conversation, and nobody answers; set task.responder.url to an "
                "OpenAI-compatible server"
            )


class Endpoint(Responder):
    """An OpenAI-compatible chat server, asked from a few threads; daemons, so that a run that ends never waits for them."""

    def __init__(self, section: ResponderSettings) -> None:
        assert section.url is not None
        self._section, self._model = section, section.model
        self._where = f"task.responder.url = {section.url!r}"
        self._key = api_key(section.api_key_variable, "task.responder.api_key_variable")
        try:
            parts = urlsplit(section.url)
            self._connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
            self._connect(parts.netloc)  # connects nowhere yet, but reads the host and the port
        except (HTTPException, ValueError) as error:
            raise UserError(f"{self._where}: is no address ({error}); write it like http://host:8000/v1") from error
        self._host = parts.netloc
        self._path = parts.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Sequence[Turn], Callable[[str], Any]]] = queue.SimpleQueue()
        self._lock, self._threads = threading.Lock(), 0

    def ask(self, turns: Sequence[Turn], then: Callable[[str], T]) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put((future, list(turns), then))
        with self._lock:
            if self._threads < self._section.requests:
                self._threads += 1
                threading.Thread(target=self._work, name=f"responder-{self._threads}", daemon=True).start()
        return future

    def _work(self) -> None:
        connection = self._connect(self._host, timeout=min(CONNECT_SECONDS, self._section.timeout_seconds))
        while True:
            future, turns, then = self._jobs.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(then(self._reply(turns, connection)))
                except Exception as error:  # passed on to the caller that waits for the reply
                    future.set_exception(error)

    def _reply(self, turns: Sequence[Turn], connection: HTTPConnection) -> str:
        section = self._section
        body = {
            "model": self._name(connection),
            "messages": recent(turns, section.context_characters),
            "max_tokens": section.max_tokens,
            "temperature": section.temperature,
        }
        answer = self._call("POST", "/chat/completions", body, connection)
        try:
            content = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(f"{self._where}: its answer has no choices[0].message.content; is it a chat server?") from error
        return tidy(content if isinstance(content, str) else "", section.max_tokens * CHARACTERS_PER_TOKEN)

    def _name(self, connection: HTTPConnection) -> str:
        if self._model is None:
            try:
                self._model = str(self._call("GET", "/models", None, connection)["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
                raise UserError(f"{self._where}: it lists no model; name one in task.responder.model") from error
        return self._model

    def _call(self, method: str, path: str, body: Any, connection: HTTPConnection) -> Any:
        """The JSON of a good answer, after as many tries as it may take."""
        pause, reason = FIRST_PAUSE_SECONDS, ""
        for attempt in range(self._section.retries + 1):
            if attempt:
                time.sleep(pause * random.uniform(0.5, 1.0))  # not all threads at once
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            try:
                status, raw = self._send(method, path, body, connection)
            except (OSError, HTTPException) as error:
                reason = str(error) or type(error).__name__
                continue
            if status == 200:
                try:
                    return json.loads(raw)
                except (ValueError, RecursionError):
                    reason = "its answer is no JSON"
                    continue
            reason = f"it answers {status}: {self._words(raw)}"
            if status in (401, 403):
                raise UserError(f"{self._where}: {reason}; put its API key into {self._section.api_key_variable}")
            if status < 500 and status not in (408, 409, 425, 429):
                break
        raise UserError(f"{self._where}: {reason}; start it, correct the address, or see task.responder.model and .retries")

    def _send(self, method: str, path: str, body: Any, connection: HTTPConnection) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        sent = None
        if body is not None:
            sent, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        longest = self._section.timeout_seconds
        deadline, reused = time.monotonic() + longest, connection.sock is not None
        try:
            connection.request(method, self._path + path, sent, headers)  # connects where it is not open
            connection.sock.settimeout(longest)
            response = connection.getresponse()
            parts, size = [], 0
            while part := response.read1(65536):
                parts.append(part)
                size += len(part)
                if size > MOST_BYTES or time.monotonic() > deadline:
                    raise OSError(f"its answer is over {MOST_BYTES} bytes" if size > MOST_BYTES else "its answer takes too long")
        except (OSError, HTTPException) as error:
            connection.close()
            if reused and isinstance(error, ConnectionError):  # it may have hung up while idle: that is no failure
                return self._send(method, path, body, connection)
            raise
        response.close()
        return response.status, b"".join(parts)

    def _words(self, raw: bytes) -> str:
        """What an error answer says, in one line, without the key."""
        text = raw[:2000].decode(errors="replace")
        text = text.replace(self._key, "[key]") if self._key else text
        return " ".join(text.split())[:300]


def recent(turns: Sequence[Turn], longest: int) -> list[Turn]:
    """Keeps the system turn and the newest turns that fit; always the last."""
    room = longest - len(turns[0]["content"])
    kept: list[Turn] = []
    for turn in reversed(turns[1:]):
        room -= len(turn["content"])
        if kept and room < 0:
            break
        kept.append(turn)
    return [*turns[:1], *reversed(kept)]


def tidy(reply: str, longest: int) -> str:
    """A model's reply as text for a transcript: no reasoning, no control characters, not longer than it may be."""
    return _CONTROLS.sub("", without_reasoning(reply)).strip()[:longest].rstrip()


def build_responder(section: ResponderSettings, folder: Path) -> Responder:
    """`folder` is the recipe's. Without a url or a script nobody answers, and a task refuses to be played."""
    if section.url is not None:
        return Endpoint(section)
    if section.script is None:
        return Silent()
    rows = read_rows(data_file(folder, section.script), "task.responder.script")
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("reply"), str) or not isinstance(row.get("when", ""), str):
            raise UserError(f"task.responder.script = {section.script!r}: row {number} is no {{when, reply}} of texts")
    return Scripted(lambda turns: _scripted_reply(rows, turns))


def _scripted_reply(rows: Sequence[Mapping[str, Any]], turns: Sequence[Turn]) -> str:
    said = turns[-1]["content"].casefold() if turns else ""
    return next((str(row["reply"]) for row in rows if str(row.get("when", "")).casefold() in said), "")
