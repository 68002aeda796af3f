"""Who answers the team: an endpoint that is asked in parallel and may fail in every way, a script, nobody."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.machinery import responder as module
from teamtr_lora.tasks.machinery.responder import Endpoint, ResponderSettings, Scripted, Silent, build_responder, tidy
from teamtr_lora.tasks.machinery.task import settled

Answer = Callable[[dict[str, Any]], tuple[int, Any]]
ASKED = [{"role": "system", "content": "play"}, {"role": "user", "content": "hello"}]


def chat(content: Any) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": content}}]}


class Server:
    """Answers as `answer(body)` says; remembers what it was asked. A reply of bytes is sent as it is."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.seen, self.headers, self.most, self._now = answer, [], [], 0, 0  # type: ignore[var-annotated]
        lock, this = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # an answer in two parts would wait 40 ms for the first to be acknowledged

            def do_POST(self) -> None:  # noqa: N802
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    this.seen.append(body)
                    this.headers.append((self.path, self.headers.get("Authorization")))
                    this._now += 1
                    this.most = max(this.most, this._now)
                status, reply = this.answer(body)
                with lock:
                    this._now -= 1
                self._send(status, reply)

            def do_GET(self) -> None:  # noqa: N802
                self._send(200, {"data": [{"id": "listed"}]})

            def _send(self, status: int, reply: Any) -> None:
                raw = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.handle_error = lambda *args: None  # type: ignore[method-assign]  # a client that hung up
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], Server]]:
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.01)
    servers: list[Server] = []

    def start(answer: Answer) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def ask(url: str, turns: list[dict[str, str]] = ASKED, **settings: Any) -> str:
    return settled(Endpoint(ResponderSettings(url=url, **settings)).ask(turns, lambda reply: reply))


def test_what_is_sent_and_what_comes_back(serve: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESPONDER_API_KEY", "secret-key")
    server = serve(lambda body: chat(f"<think>hm</think> you said {body['messages'][-1]['content']}\x00 "))
    assert ask(server.url, model="m", temperature=0.2, max_tokens=9) == "you said hello"
    assert ask(server.url + "/v1/") == "you said hello"
    assert ask(server.url + "/other/v2/chat/completions") == "you said hello"
    assert server.seen[0] == {"model": "m", "messages": ASKED, "max_tokens": 9, "temperature": 0.2}
    assert [body["model"] for body in server.seen] == ["m", "listed", "listed"]
    paths = [path for path, _ in server.headers]
    assert paths == ["/v1/chat/completions", "/v1/chat/completions", "/other/v2/chat/completions"]
    assert {key for _, key in server.headers} == {"Bearer secret-key"}


def test_replies_come_in_parallel_and_at_most_so_many(serve: Callable[[Answer], Server]) -> None:
    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.1)
        return chat(body["messages"][-1]["content"])

    server = serve(slow)
    responder = Endpoint(ResponderSettings(url=server.url, model="m", requests=8))
    futures = [responder.ask([{"role": "user", "content": str(n)}], lambda reply: int(reply) + 1) for n in range(24)]
    assert [future.result(timeout=20) for future in futures] == list(range(1, 25))
    assert 2 <= server.most <= 8


def test_a_busy_server_is_asked_again(serve: Callable[[Answer], Server]) -> None:
    replies = iter([(503, b"down"), (429, {"error": "slow down"}), (200, b"not json"), chat("at last")])
    server = serve(lambda body: next(replies))
    assert ask(server.url, model="m", retries=3) == "at last" and len(server.seen) == 4


@pytest.mark.parametrize(
    ("answer", "message", "tries"),
    [
        ((500, b"oh"), r"task.responder.url = .*: it answers 500: oh; start it", 3),
        ((404, {"error": "no model m"}), "it answers 404: .*no model m.*task.responder.model", 1),
        ((401, b"bad key secret-key"), r"it answers 401: bad key \[key\]; put its API key into RESPONDER_API_KEY", 1),
        ((200, {"choices": []}), "no choices.*is it a chat server", 1),
        ((200, b"[" * 200_000), "its answer is no JSON", 3),
        ((200, b"x" * (module.MOST_BYTES + 70_000)), "its answer is over 4000000 bytes", 3),
    ],
)
def test_failures_are_one_line_without_the_key(
    serve: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch, answer: tuple[int, Any], message: str, tries: int
) -> None:
    monkeypatch.setenv("RESPONDER_API_KEY", "secret-key")
    server = serve(lambda body: answer)
    with pytest.raises(UserError, match=message) as caught:
        ask(server.url, model="m", retries=2)
    assert len(server.seen) == tries
    assert "\n" not in str(caught.value) and "secret-key" not in str(caught.value)


def test_nobody_there_and_a_server_that_never_ends(serve: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(lambda body: (time.sleep(1.0), chat("late"))[1])
    with pytest.raises(UserError, match="timed out"):
        ask(server.url, model="m", retries=0, timeout_seconds=0.2)
    closed = serve(lambda body: chat(""))
    closed.close()
    with pytest.raises(UserError, match=r"task.responder.url = 'http://127.*refused.*correct the address"):
        ask(closed.url, model="m", retries=1)
    monkeypatch.setenv("RESPONDER_API_KEY", "känn")
    with pytest.raises(UserError, match="RESPONDER_API_KEY holds is no API key") as caught:
        ask(closed.url)
    assert "känn" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [None, "", 5, {"a": 1}, "<think>never", "\ud800", "x" * 10**6, "\x00\x1b[31m" * 1000, "😀" * 9999]
)
def test_odd_replies_are_text_of_bounded_length(serve: Callable[[Answer], Server], content: Any) -> None:
    server = serve(lambda body: chat(content))
    reply = ask(server.url, model="m", max_tokens=16)
    assert len(reply) <= 16 * module.CHARACTERS_PER_TOKEN and reply.encode("utf-8") is not None
    assert not any(ch < " " for ch in reply)


def test_a_reply_nobody_waits_for_is_not_asked_for(serve: Callable[[Answer], Server]) -> None:
    gate = threading.Event()
    server = serve(lambda body: (gate.wait(5), chat("x"))[1])
    responder = Endpoint(ResponderSettings(url=server.url, model="m", requests=1))
    futures: list[Future[str]] = [responder.ask(ASKED, lambda reply: reply) for _ in range(4)]
    while not server.seen:
        time.sleep(0.005)
    assert [future.cancel() for future in futures[1:]] == [True] * 3
    gate.set()
    wait(futures)
    assert futures[0].result() == "x" and len(server.seen) == 1


def test_an_error_of_the_task_reaches_whoever_waits(serve: Callable[[Answer], Server]) -> None:
    server = serve(lambda body: chat("x"))
    with pytest.raises(ZeroDivisionError):
        settled(Endpoint(ResponderSettings(url=server.url, model="m")).ask(ASKED, lambda reply: 1 / 0))


def test_scripts_and_silence(tmp_path: Path) -> None:
    rows = [{"when": "Name", "reply": "Ada"}, {"when": "zip", "reply": "123"}, {"reply": "what?"}]
    (tmp_path / "script.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = build_responder(ResponderSettings(script="script.jsonl"), tmp_path)
    assert isinstance(script, Scripted) and script.live
    said = [script.ask([{"role": "user", "content": text}], str) for text in ("your name?", "your ZIP?", "and?")]
    assert said == ["Ada", "123", "what?"]
    silent = build_responder(ResponderSettings(), tmp_path)
    assert isinstance(silent, Silent) and not silent.live and silent.ask(ASKED, lambda reply: reply + "!") == "!"
    (tmp_path / "script.jsonl").write_text('{"when": 3, "reply": "x"}\n')
    with pytest.raises(UserError, match="task.responder.script = 'script.jsonl': row 1"):
        build_responder(ResponderSettings(script="script.jsonl"), tmp_path)
    with pytest.raises(UserError, match="is no address"):
        build_responder(ResponderSettings(url="http://host:port"), tmp_path)


def test_a_long_conversation_loses_its_oldest_turns(serve: Callable[[Answer], Server]) -> None:
    turns = [{"role": "system", "content": "s" * 500}] + [{"role": "user", "content": str(n) * 100} for n in range(9)]
    server = serve(lambda body: chat("ok"))
    ask(server.url, turns, model="m", context_characters=1000)
    assert server.seen[0]["messages"] == [turns[0], *turns[-5:]]
    assert module.recent(turns, 10) == [turns[0], turns[-1]] and module.recent(turns, 1400) == turns
    assert module.recent(turns[:1], 10) == turns[:1]


def test_tidy_keeps_what_a_person_would_write() -> None:
    assert tidy("  a\n\tb <think>c</think>é😀 ", 100) == "a\n\tb é😀" and tidy("abc  def", 5) == "abc"
