"""ServerSampler against small fake servers that answer by a rule, refuse, hang and die on command."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase
from teamtr_lora.base.versions import AdapterVersion, read_version, write_version
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import RolloutSection
from teamtr_lora.rollout import vllm_server
from teamtr_lora.rollout.sampler import Completion, Request, SamplingParams
from teamtr_lora.rollout.vllm_server import ServerSampler

KEY = "sesame-open-1234"


def expected(seed: int, count: int) -> list[int]:
    """What every fake server answers: the seed alone decides."""
    return [(seed * 7 + i) % 250 + 3 for i in range(count)]


class Fake:
    """A vLLM server as far as the sampler can tell."""

    def __init__(self, **options: Any) -> None:
        self.models: dict[str, str] = {}  # adapters loaded, with their paths
        self.uploads: dict[str, bytes] = {}
        self.bodies: list[dict[str, Any]] = []  # completions of adapters asked for
        self.keys: set[str | None] = set()
        self.waiting = 0
        self.go = threading.Event()  # completions wait for it
        self.go.set()
        self.statuses: list[int] = []  # answers to give before any proper one
        self.load_status = 200
        self.replicas = 0  # data-parallel ones that can be asked for by number; 0: numbers are not looked at
        self.processes = 1  # that answer here in turn, one of which has the adapters
        self.serves, self.context, self.temperature_applies, self.key = "tiny", 512, True, ""
        self.other_weights, self.logp_V = 0.0, []  # nats away from the base's own log-probabilities
        self.runtime_lora = self.takes_uploads = True
        self.answer_model: str | None = None
        self.finish = "length"
        for name, value in options.items():
            assert hasattr(self, name), name
            setattr(self, name, value)
        self.asked = 0
        self.connections: set[socket.socket] = set()
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # an answer in two parts would wait 40 ms for the first to be acknowledged

            def setup(self) -> None:
                super().setup()
                fake.connections.add(self.connection)

            def handle(self) -> None:
                with suppress(OSError):
                    super().handle()

            def finish(self) -> None:
                fake.connections.discard(self.connection)
                with suppress(OSError):
                    super().finish()

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def answer(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if 0 < fake.replicas <= int(self.headers.get("X-data-parallel-rank", 0)):
                    status, said = 400, {"error": {"message": f"is out of range [0, {fake.replicas})"}}
                else:
                    status, said = fake.answer(self.command, self.path, raw, self.headers.get("Authorization"))
                data = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.request_queue_size = 512
        self.server.socket.listen(512)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, method: str, path: str, raw: bytes, authorization: str | None) -> tuple[int, Any]:
        with self.lock:
            self.keys.add(authorization)
        if self.key and authorization != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        if path == "/health":
            return 200, ""
        if path == "/v1/models":
            self.asked += 1
            if self.asked % self.processes:
                return 200, {"data": [{"id": self.serves, "parent": None}]}
            base = {"id": self.serves, "root": f"/elsewhere/{self.serves}", "parent": None, "max_model_len": self.context}
            return 200, {"data": [base, *({"id": name, "parent": self.serves} for name in self.models)]}
        if path.startswith("/v1/teamtr/adapters"):
            return self.upload(method, path.removeprefix("/v1/teamtr/adapters").removeprefix("/"), raw)
        if path.endswith("lora_adapter"):
            return self.lora(path, json.loads(raw))
        assert path == "/v1/completions" and method == "POST"
        return self.complete(json.loads(raw), authorization)

    def upload(self, method: str, name: str, raw: bytes) -> tuple[int, Any]:
        if not self.takes_uploads:
            return 404, {"detail": "Not Found"}
        if method == "PUT":
            self.uploads[name] = raw
        elif method == "DELETE":
            self.uploads.pop(name, None)
        return 200, {"path": f"/uploads/{name}"}

    def lora(self, path: str, body: dict[str, str]) -> tuple[int, Any]:
        if not self.runtime_lora:
            return 404, {"detail": "Not Found"}
        name = body["lora_name"]
        if path == "/v1/unload_lora_adapter":
            return (200, "ok") if self.models.pop(name, None) else (404, {"error": {"message": "cannot be found"}})
        if not name or name in self.models:
            return 400, {"error": {"message": "must be provided, or has already been loaded"}}
        if self.load_status != 200:
            return self.load_status, {"error": {"message": "LoRA rank 16 is greater\nthan max_lora_rank 8"}}
        self.models[name] = body["lora_path"]
        return 200, "ok"

    def complete(self, body: dict[str, Any], authorization: str | None) -> tuple[int, Any]:
        model, count = body["model"], body["max_tokens"]
        if model != self.serves:
            with self.lock:
                self.bodies.append(body)
                self.waiting += 1
                status = self.statuses.pop(0) if self.statuses else 200
            self.go.wait(30)
            with self.lock:
                self.waiting -= 1
            if status != 200:
                return status, {"error": {"message": f"trouble with {authorization}"}}
            if model not in self.models:
                return 404, {"error": {"message": f"The model `{model}` does not exist."}}
            if body["prompt"][-1] == 66:
                return 400, {"error": {"message": "I do not like 66"}}
        scale = body["temperature"] or 1.0 if self.temperature_applies else 1.0
        top = [{f"token_id:{token}": self.logp_V[token] / scale for token in range(1, 1 + body["logprobs"])}]
        tokens = expected(body["seed"], count)
        logprobs = {"token_logprobs": [-0.25 * (i + 1) for i in range(count)], "top_logprobs": top}
        choice = {"token_ids": tokens, "logprobs": logprobs, "finish_reason": self.finish}
        return 200, {"model": self.answer_model or model, "choices": [choice]}

    def drop_connections(self) -> None:
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def die(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.drop_connections()
        self.go.set()


@pytest.fixture
def start() -> Iterator[Callable[..., Fake]]:
    fakes: list[Fake] = []

    def make(**options: Any) -> Fake:
        fakes.append(Fake(**options))
        return fakes[-1]

    yield make
    for fake in fakes:
        fake.die()


@pytest.fixture
def open_sampler(base: FrozenBase, bank: AdapterBank, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ServerSampler]]:
    """Opens samplers with all agents published; closes them at the end."""
    monkeypatch.setattr(vllm_server, "RETRY_SECONDS", 0.01)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    opened: list[ServerSampler] = []

    def make(*fakes: Fake, publish: bool = True, temperature: float = 1.0, **server: Any) -> ServerSampler:
        section = {"urls": [fake.url for fake in fakes], "timeout_seconds": 30.0, **server}
        rollout = RolloutSection.model_validate({"engine": "vllm_server", "temperature": temperature, "server": section})
        logp_V = vllm_server._first_logprobs(bank, base.eos_ids[0])
        for fake in fakes:
            fake.logp_V = [logp - fake.other_weights for logp in logp_V]
        opened.append(ServerSampler(base, bank, rollout, context_tokens=128))
        for agent in bank.agents if publish else ():
            opened[-1].publish(bank.version(agent))
        return opened[-1]

    yield make
    for sampler in opened:
        sampler.close()


@contextmanager
def moved(bank: AdapterBank, agent: str) -> Iterator[AdapterVersion]:
    """A next version of an agent, undone at the end: the bank is shared by the tests."""
    version, before = bank.version(agent), bank.snapshot(agent)
    try:
        bank.restore(agent, {name: tensor + 0.01 for name, tensor in before.items()})
        yield bank.commit(agent)
    finally:
        bank.load(version, before)


def request(seed: int = 0, agent: str = "a", *, last: int = 70, max_tokens: int = 4, temperature: float = 1.0) -> Request:
    return Request([1, 80, last], agent, SamplingParams(temperature, max_tokens, (2,)), seed)


def collect(sampler: ServerSampler, tickets: list[int]) -> list[Completion]:
    done: dict[int, Completion] = {}
    while len(done) < len(tickets):
        finished = sampler.poll()
        assert finished, "poll answers as long as something is queued"
        done |= {completion.ticket: completion for completion in finished}
    assert sampler.poll() == []
    return [done[ticket] for ticket in tickets]


def run(sampler: ServerSampler, requests: list[Request]) -> list[Completion]:
    return collect(sampler, [sampler.submit(r) for r in requests])


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def deaths(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "counts as dead" in record.getMessage()]


def test_requests_are_shared_by_least_outstanding(start: Callable[..., Fake], open_sampler: Any, bank: AdapterBank) -> None:
    one, two = start(), start()
    sampler = open_sampler(one, two)
    one.go.clear(), two.go.clear()
    requests = [request(seed, "abc"[seed % 3]) for seed in range(40)]
    tickets = [sampler.submit(r) for r in requests]
    wait_for(lambda: one.waiting + two.waiting == 40)
    assert (one.waiting, two.waiting) == (20, 20)
    one.go.set(), two.go.set()
    done = collect(sampler, tickets)
    assert [c.token_ids for c in done] == [expected(seed, 4) for seed in range(40)]
    assert [c.version for c in done] == [bank.version(r.agent).name for r in requests]
    assert done[0].logprobs == [-0.25, -0.5, -0.75, -1.0] and done[0].finish == "length" and done[0].error is None


def test_a_request_says_the_whole_policy(start: Callable[..., Fake], open_sampler: Any) -> None:
    """Nothing is left to the server's defaults, and the seed fits 64 bits with a sign."""
    fake = start(finish="stop")
    sampler = open_sampler(fake)
    big = run(sampler, [request(2**64 - 1, "b", max_tokens=2, temperature=0.5)])[0]
    assert big.token_ids == expected(2**63 - 1, 2) and big.finish == "stop"
    body = fake.bodies[0]
    assert body.pop("model") in fake.models
    assert body == {
        "prompt": [1, 80, 70], "max_tokens": 2, "temperature": 0.5, "seed": 2**63 - 1, "stop_token_ids": [2], "ignore_eos": True,
        "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip


def test_a_death_in_the_middle_moves_the_requests(
    start: Callable[..., Fake], open_sampler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = start(), start()
    sampler = open_sampler(one, two)
    one.go.clear(), two.go.clear()
    tickets = [sampler.submit(request(seed)) for seed in range(30)]
    wait_for(lambda: one.waiting + two.waiting == 30)
    one.die()
    two.go.set()
    assert [c.token_ids for c in collect(sampler, tickets)] == [expected(seed, 4) for seed in range(30)]
    assert {body["seed"] for body in two.bodies} == set(range(30)), "the same seeds"
    assert len(deaths(caplog)) == 1 and one.url in deaths(caplog)[0]
    assert run(sampler, [request(99)])[0].token_ids == expected(99, 4)


def test_when_all_are_dead_the_user_is_told_to_resume(start: Callable[..., Fake], open_sampler: Any, bank: AdapterBank) -> None:
    one, two = start(), start()
    sampler = open_sampler(one, two)
    one.go.clear(), two.go.clear()
    for seed in range(6):
        sampler.submit(request(seed))
    wait_for(lambda: one.waiting + two.waiting == 6)
    one.die(), two.die()
    with pytest.raises(UserError, match=r"no server is left .*checkpoint is intact.*--resume") as caught:
        sampler.poll()
    assert one.url in str(caught.value) and two.url in str(caught.value) and "\n" not in str(caught.value)
    sampler.submit(request(7))
    with pytest.raises(UserError, match="--resume"):
        sampler.poll()
    with moved(bank, "a") as version, pytest.raises(UserError, match="--resume"):
        sampler.publish(version)


def test_a_hanging_server_is_left_after_the_timeout(
    start: Callable[..., Fake], open_sampler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, good = start(), start()
    sampler = open_sampler(stuck, good, timeout_seconds=2.0)
    stuck.go.clear()
    started = time.monotonic()
    assert [c.token_ids for c in run(sampler, [request(seed) for seed in range(20)])] == [expected(s, 4) for s in range(20)]
    assert time.monotonic() - started < 20
    assert len(deaths(caplog)) == 1 and "no answer within 2 seconds" in deaths(caplog)[0]
    asked = [body["seed"] for body in stuck.bodies]
    assert asked and len(asked) == len(set(asked)), "a timeout is not tried twice"


def test_one_failure_is_retried_and_two_are_a_death(
    start: Callable[..., Fake], open_sampler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    alone = start(statuses=[503])
    assert run(open_sampler(alone), [request(5)])[0].token_ids == expected(5, 4)
    assert len(alone.bodies) == 2 and not deaths(caplog)
    failing, good = start(statuses=[500] * 99), start()
    done = run(open_sampler(failing, good), [request(seed) for seed in range(4)])
    assert [c.token_ids for c in done] == [expected(seed, 4) for seed in range(4)]
    assert len(deaths(caplog)) == 1 and "answers 500" in deaths(caplog)[0]


def test_a_connection_that_the_server_closed_is_no_death(
    start: Callable[..., Fake], open_sampler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fake = start()
    sampler = open_sampler(fake)
    for seed in range(3):
        assert run(sampler, [request(seed)])[0].token_ids == expected(seed, 4)
        assert len(fake.connections) == 1, "connections are kept"
        fake.drop_connections()
        wait_for(lambda: not fake.connections)
    assert not deaths(caplog)


def test_a_refused_request_fails_alone(start: Callable[..., Fake], open_sampler: Any) -> None:
    fake = start()
    bad = [request(2, last=66), request(3, last=999), request(4, "nobody"), request(5, max_tokens=126)]
    sampler = open_sampler(fake)
    done = run(sampler, [request(1), *bad, request(6)])
    errors = [c.error for c in done]
    assert errors[0] is None and errors[5] is None and done[5].token_ids == expected(6, 4)
    assert errors[1] == f"{fake.url} refused the request: I do not like 66"
    assert "outside 0..271" in (errors[2] or "") and "'nobody'" in (errors[3] or "") and "context of 128" in (errors[4] or "")
    assert len(fake.bodies) == 3, "what no server could serve is not sent"
    assert run(sampler, [request(7)])[0].error is None


def test_a_server_that_lost_its_adapters_is_dead(
    start: Callable[..., Fake], open_sampler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    restarted, good = start(), start()
    sampler = open_sampler(restarted, good)
    restarted.models.clear()
    assert all(c.token_ids for c in run(sampler, [request(seed) for seed in range(4)]))
    assert len(deaths(caplog)) == 1 and "started again" in deaths(caplog)[0]


def test_an_answer_of_another_model_is_an_error(start: Callable[..., Fake], open_sampler: Any) -> None:
    fake = start(answer_model="tiny")
    sampler = open_sampler(fake)
    sampler.submit(request())
    with pytest.raises(RuntimeError, match="answered with model 'tiny', asked was 'a.v0001-"):
        sampler.poll()


def test_a_server_that_goes_down_gives_no_half_messages(start: Callable[..., Fake], open_sampler: Any) -> None:
    ending, good = start(), start()
    sampler = open_sampler(ending, good)
    ending.finish = "abort"
    assert [c.token_ids for c in run(sampler, [request(seed) for seed in range(4)])] == [expected(s, 4) for s in range(4)]
    assert {body["seed"] for body in good.bodies} == {0, 1, 2, 3}


# --- adapters


def test_a_version_reaches_every_server_under_a_name_of_its_own(
    start: Callable[..., Fake], open_sampler: Any, bank: AdapterBank
) -> None:
    one, two = start(), start()
    first = open_sampler(one, two)
    names = set(one.models)
    assert names == set(two.models) and {name.split(".")[0] for name in names} == {"a", "b", "c"}
    assert all(f".{bank.version(name[0]).name}." in name for name in names)
    assert one.models == {name: f"/uploads/{name}" for name in names} == two.models
    first.publish(bank.version("a"))
    assert set(one.models) == names, "the same version is not sent again"
    second = open_sampler(one, two)
    assert len(one.models) == 6, "another run has names of its own"
    first.close()
    assert not names & one.models.keys() and not names & two.uploads.keys()
    assert run(second, [request(3, "c")])[0].version == bank.version("c").name


def test_a_superseded_version_goes_when_its_last_request_is_done(
    start: Callable[..., Fake], open_sampler: Any, bank: AdapterBank
) -> None:
    one, two = start(), start()
    sampler = open_sampler(one, two)
    (old,) = [name for name in one.models if name.startswith("a.")]
    before = bank.version("a")
    one.go.clear(), two.go.clear()
    tickets = [sampler.submit(request(seed)) for seed in range(4)]
    wait_for(lambda: one.waiting + two.waiting == 4)
    with moved(bank, "a") as version:
        sampler.publish(version)
        assert old in one.models and old in two.models and len(one.models) == 4
        two.go.set()
        first = sampler.poll()
        assert old in one.models and old in two.models, "requests of it are still out"
        tickets += [sampler.submit(request(9))]
        one.go.set()
        done = {c.ticket: c for c in first + collect(sampler, [t for t in tickets if t not in {c.ticket for c in first}])}
    assert [done[ticket].version for ticket in tickets] == [before.name] * 4 + [version.name]
    for fake in (one, two):
        assert old not in fake.models and old not in fake.uploads and len(fake.models) == 3


@pytest.mark.parametrize("shared", [False, True])
def test_a_version_that_one_server_refuses_is_live_nowhere(
    start: Callable[..., Fake], open_sampler: Any, bank: AdapterBank, tmp_path: Path, shared: bool
) -> None:
    """All or nothing: it is taken off the servers that took it, and what was live before still is."""
    one, two, three = start(), start(), start()
    sampler = open_sampler(one, two, three, **({"adapter_root": str(tmp_path)} if shared else {}))
    before, loaded = bank.version("b"), set(one.models)
    two.load_status = 500
    with moved(bank, "b") as version, pytest.raises(UserError) as caught:
        sampler.publish(version)
    said = str(caught.value)
    assert f"b {version.name} is live nowhere: 1 of 3 servers" in said and "max_lora_rank 8" in said and "--resume" in said
    assert two.url in said and one.url not in said and three.url not in said and "\n" not in said
    for fake in (one, two, three):
        assert set(fake.models) == loaded and not [name for name in fake.uploads if version.name in name]
    assert not [path for path in tmp_path.rglob("*") if path.name == version.name]
    for fake in (one, two, three):
        fake.go.clear()
    tickets = [sampler.submit(request(seed, "b")) for seed in range(9)]
    wait_for(lambda: all(fake.waiting for fake in (one, two, three)))  # a refusal is no death
    for fake in (one, two, three):
        fake.go.set()
    assert {c.version for c in collect(sampler, tickets)} == {before.name}
    two.load_status = 200
    with moved(bank, "b") as version:
        sampler.publish(version)
        assert {c.version for c in run(sampler, [request(s, "b") for s in range(9)])} == {version.name}


def test_a_server_that_does_not_answer_is_no_refusal(
    start: Callable[..., Fake], open_sampler: Any, bank: AdapterBank, caplog: pytest.LogCaptureFixture
) -> None:
    """What nobody can sample from need not have the version; one that is gone is left out until it comes back."""
    one, two = start(), start()
    sampler = open_sampler(one, two)
    one.load_status = 503
    with moved(bank, "b") as version:
        sampler.publish(version)
        assert len(deaths(caplog)) == 1 and one.url in deaths(caplog)[0]
        assert {c.version for c in run(sampler, [request(s, "b") for s in range(4)])} == {version.name}
        assert not one.bodies and len(two.bodies) == 4


def test_a_load_that_reaches_one_process_only_is_found_out(
    start: Callable[..., Fake], open_sampler: Any, bank: AdapterBank
) -> None:
    fake = start()
    sampler = open_sampler(fake)
    fake.processes = 2
    with (
        moved(bank, "a") as version,
        pytest.raises(UserError, match="live nowhere.*not all that answer.*by an address of its own"),
    ):
        sampler.publish(version)
    assert len(fake.models) == 3


def test_a_server_that_came_back_has_the_live_versions_before_it_is_asked(
    start: Callable[..., Fake], open_sampler: Any, bank: AdapterBank, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(vllm_server, "LOOK_SECONDS", 0.05)
    restarted, good = start(), start()
    sampler = open_sampler(restarted, good)
    restarted.statuses, restarted.load_status = [500] * 4, 503  # it fails, keeping its adapters: it was never started again
    run(sampler, [request(seed) for seed in range(4)])
    assert len(deaths(caplog)) == 1
    with moved(bank, "a") as version:
        sampler.publish(version)
        time.sleep(0.06)
        run(sampler, [request(9)])
        assert set(restarted.models) != set(good.models) and "has come back" not in caplog.text, "it cannot load yet"
        restarted.load_status = 200
        restarted.statuses, restarted.bodies = [], []
        time.sleep(0.06)
        assert {c.version for c in run(sampler, [request(seed) for seed in range(8)])} == {version.name}
        assert set(restarted.models) == set(good.models) and "has come back; it has the 3 live adapters" in caplog.text
        run(sampler, [request(seed) for seed in range(8)])
        assert restarted.bodies and len(deaths(caplog)) == 1
        assert all(body["model"] in good.models for body in restarted.bodies)


def test_a_server_that_came_back_with_another_base_is_not_used(
    start: Callable[..., Fake], open_sampler: Any, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(vllm_server, "LOOK_SECONDS", 0.01)
    other, good = start(), start()
    sampler = open_sampler(other, good)
    other.models.clear()
    other.serves = "other"
    run(sampler, [request(seed) for seed in range(4)])
    other.bodies.clear()
    for _ in range(3):
        time.sleep(0.05)
        run(sampler, [request(seed) for seed in range(4)])
    assert not other.bodies and caplog.text.count("is not used: rollout.server.urls") == 1


def test_an_episode_stays_at_the_server_that_has_its_prefix(start: Callable[..., Fake], open_sampler: Any) -> None:
    one, two = start(), start()
    sampler = open_sampler(one, two)
    one.go.clear(), two.go.clear()

    def turn(number: int) -> list[int]:
        prompts = [[episode + 10] * (number + 1) for episode in range(6)]
        return [
            sampler.submit(Request(prompt, "abc"[number], SamplingParams(1.0, 1, ()), number, episode))
            for episode, prompt in enumerate(prompts)
        ]

    tickets = turn(0)
    wait_for(lambda: one.waiting + two.waiting == 6)
    one.go.set(), two.go.set()
    collect(sampler, tickets)
    homes = {body["prompt"][0]: fake for fake in (one, two) for body in fake.bodies}
    assert [fake.bodies for fake in (one, two)].count([]) == 0 and len(one.bodies) == 3, "new episodes go to the least busy"
    for number in (1, 2):
        one.bodies.clear(), two.bodies.clear()
        collect(sampler, turn(number))
        assert all(homes[body["prompt"][0]] is fake for fake in (one, two) for body in fake.bodies)
    one.die()
    assert all(c.error is None for c in collect(sampler, turn(1)))


def test_what_an_interrupt_leaves_of_a_version_is_taken_off_again(
    start: Callable[..., Fake], open_sampler: Any, bank: AdapterBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = start()
    sampler = open_sampler(fake)
    deliver = sampler._deliver_everywhere

    def interrupted(published: Any) -> None:
        deliver(published)
        raise KeyboardInterrupt

    monkeypatch.setattr(sampler, "_deliver_everywhere", interrupted)
    with moved(bank, "a") as version, pytest.raises(KeyboardInterrupt):
        sampler.publish(version)
    assert len(fake.models) == 4 and run(sampler, [request(1)])[0].version == bank.version("a").name
    assert len(fake.models) == 3 == len(fake.uploads)


def test_the_folder_of_a_version_that_came_back_stays(
    start: Callable[..., Fake], open_sampler: Any, bank: AdapterBank, tmp_path: Path
) -> None:
    fake = start(takes_uploads=False)
    sampler = open_sampler(fake, adapter_root=str(tmp_path))
    before = bank.version("a")
    fake.go.clear()
    ticket = sampler.submit(request(1))
    wait_for(lambda: fake.waiting == 1)
    with moved(bank, "a") as version:
        sampler.publish(version)
    sampler.publish(before)
    fake.go.set()
    collect(sampler, [ticket])
    assert [path.name for path in tmp_path.glob("teamtr-*/a/*")] == [before.name] and len(fake.models) == 3


def test_versions_go_through_a_shared_folder(
    start: Callable[..., Fake], open_sampler: Any, bank: AdapterBank, tmp_path: Path
) -> None:
    fake = start(takes_uploads=False)
    root = tmp_path / "shared"  # which holds the same versions of another run already
    theirs = {agent: write_version(root, bank.version(agent), bank.tensors(agent), bank.config(agent)) for agent in bank.agents}
    sampler = open_sampler(fake, adapter_root=str(root))
    (own,) = [folder for folder in root.iterdir() if folder.name.startswith("teamtr-")]
    for name, path in fake.models.items():
        version = bank.version(name[0])
        assert Path(path) == own / version.agent / version.name
        stored = read_version(own, version)
        assert all(torch.equal(stored[key], tensor) for key, tensor in bank.tensors(version.agent).items())
    assert run(sampler, [request(1)])[0].token_ids == expected(1, 4)
    before = bank.version("a")
    with moved(bank, "a") as version:
        sampler.publish(version)
        assert not (own / "a" / before.name).exists() and (own / "a" / version.name).exists()
    sampler.close()
    assert not own.exists() and all(folder.is_dir() for folder in theirs.values())


def test_only_what_the_bank_holds_can_be_published(start: Callable[..., Fake], open_sampler: Any, bank: AdapterBank) -> None:
    fake = start()
    sampler = open_sampler(fake, publish=False)
    current = bank.version("a")
    with pytest.raises(RuntimeError, match="bank holds another version"):
        sampler.publish(AdapterVersion("a", current.number + 1, current.content_hash))
    assert not fake.models and "unknown agent 'a'" in (run(sampler, [request()])[0].error or "")


def test_close_gives_up_what_is_in_flight(start: Callable[..., Fake], open_sampler: Any) -> None:
    fake = start()
    sampler = open_sampler(fake)
    fake.go.clear()
    for seed in range(5):
        sampler.submit(request(seed))
    wait_for(lambda: fake.waiting == 5)
    started = time.monotonic()
    sampler.close()
    sampler.close()
    assert time.monotonic() - started < 20 and sampler.poll() == []
    assert not fake.models and not fake.uploads
    wait_for(lambda: not [t for t in threading.enumerate() if t.name.startswith("rollout-")])
    assert len(fake.bodies) == 5, "nothing is asked again"


# --- the start


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"serves": "other"}, {}, r"serves other, but base.source is .*--served-model-name"),
        ({"other_weights": 1.0}, {}, "other weights than base.source"),
        ({"context": 100}, {}, r"context of 100 tokens, the team's is 128.*--max-model-len 128"),
        ({"runtime_lora": False}, {}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ({"takes_uploads": False}, {}, "takes no uploads.*--accept-adapters.*adapter_root"),
        ({"temperature_applies": False}, {"temperature": 0.7}, "--logprobs-mode processed_logprobs"),
        ({"replicas": 2}, {}, "several data-parallel replicas.*start one server a replica"),
        ({"key": KEY}, {}, "asks for an API key.* VLLM_API_KEY"),
    ],
)
def test_an_unfit_server_is_refused(
    start: Callable[..., Fake], open_sampler: Any, options: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    good, bad = start(), start(**options)
    with pytest.raises(UserError, match=message) as caught:
        open_sampler(good, bad, **settings)
    assert bad.url in str(caught.value) and good.url not in str(caught.value) and "\n" not in str(caught.value)


def test_a_server_of_one_replica_is_taken(start: Callable[..., Fake], open_sampler: Any) -> None:
    assert run(open_sampler(start(replicas=1)), [request(1)])[0].token_ids == expected(1, 4)


def test_log_probabilities_before_the_temperature_do_at_temperature_one(start: Callable[..., Fake], open_sampler: Any) -> None:
    assert run(open_sampler(start(temperature_applies=False)), [request(1)])[0].token_ids == expected(1, 4)


def test_a_server_that_is_not_there_is_named(start: Callable[..., Fake], open_sampler: Any) -> None:
    gone = start()
    gone.die()
    with pytest.raises(UserError, match=f"{gone.url} cannot be used .*refused.*teamtr-lora serve"):
        open_sampler(gone)


def test_a_server_that_is_gone_does_not_keep_the_others_from_a_run(
    start: Callable[..., Fake], open_sampler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    good, gone, failing = start(), start(), start(finish="abort")
    gone.die()
    sampler = open_sampler(gone, good, failing)
    assert run(sampler, [request(seed) for seed in range(4)])[3].token_ids == expected(3, 4)
    assert sum("counts as dead" in record.getMessage() for record in caplog.records) == 2


def test_the_key_is_sent_and_never_told(
    start: Callable[..., Fake], open_sampler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Even a server that repeats it in its errors does not get it into ours."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_API_KEY", f"{KEY}\n")
    fake = start(key=KEY)
    sampler = open_sampler(fake, api_key_variable="MY_API_KEY")
    assert run(sampler, [request(1)])[0].token_ids == expected(1, 4)
    assert fake.keys == {f"Bearer {KEY}"}
    fake.statuses = [400]
    refused = run(sampler, [request(2)])[0].error or ""
    assert "trouble with Bearer [key]" in refused
    fake.statuses = [500, 500]
    sampler.submit(request(3))
    with pytest.raises(UserError, match="trouble with") as caught:
        sampler.poll()
    assert KEY not in str(caught.value) + refused + caplog.text
    monkeypatch.setenv("MY_API_KEY", f"{KEY}\nX-Other: 1")
    with pytest.raises(UserError, match="MY_API_KEY") as caught:
        open_sampler(start(), api_key_variable="MY_API_KEY")
    assert KEY not in str(caught.value)


def test_nothing_is_taken_after_close(start: Callable[..., Fake], open_sampler: Any, bank: AdapterBank) -> None:
    sampler = open_sampler(start())
    sampler.close()
    with pytest.raises(RuntimeError, match="closed"):
        sampler.submit(request())
    with pytest.raises(RuntimeError, match="closed"):
        sampler.publish(bank.version("a"))
