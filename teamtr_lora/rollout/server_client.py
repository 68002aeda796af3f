"""One vLLM server, as `vllm_server` talks to it: HTTP, what requests and answers look like, what is checked at the start."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

from teamtr_lora.base.frozen_base import FrozenBase
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import RolloutSection
from teamtr_lora.rollout.adapter_upload import PATH
from teamtr_lora.rollout.sampler import Request, SamplingParams

CONNECT_SECONDS = 10.0
OTHER_WEIGHTS = 0.5  # nats: a larger difference means other weights, not another precision
GONE = (502, 503, 504)  # answers of a proxy or a server that is not up
ASKED = 4  # connections by which a server is asked whether it has an adapter: processes that share a port take turns
IDLE_SECONDS = 3.0  # vLLM hangs up on a connection that is idle for five
SERVE = "`teamtr-lora serve TEAM --accept-adapters`"


class ServerFailedError(Exception):
    """The server, not the request, is at fault. `final`: asking once more would not help. `answered`: it is there and says no."""

    def __init__(self, reason: str, *, final: bool = False, answered: bool = False) -> None:
        super().__init__(reason)
        self.final, self.answered = final, answered


class UnreachableError(UserError):
    """Nothing that answers as a vLLM server is there."""


class Server:
    """HTTP on connections that are kept open, from any number of threads."""

    def __init__(self, url: str, timeout: float, key: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
        self.dead: str | None = None  # why
        self.deaths = 0  # of all servers that were at this address
        self.look_at = 0.0  # when a dead one may be looked at again
        self.outstanding = 0
        self.loaded: set[str] = set()  # models that this run has put there
        try:
            parts = urlsplit(self.url)
            kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
            self._open = partial(kind, parts.netloc, timeout=min(CONNECT_SECONDS, timeout))
            self._open()  # connects nowhere yet, but reads the host and the port
        except (HTTPException, ValueError) as error:
            raise UserError(f"rollout.server.urls: {url} is no address ({error}); write it like http://host:8000") from error
        self._prefix, self._key = parts.path, key
        self._lock = threading.Lock()
        self._idle: list[tuple[HTTPConnection, float]] = []
        self._busy: set[HTTPConnection] = set()

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout: float | None = None,
        fresh: bool = False,
        replica: int | None = None,
    ) -> tuple[int, bytes]:
        """The status and body of an answer, whatever it says; ServerFailedError if there is none. `fresh`: by a connection of
        its own. `replica`: the data-parallel one to ask."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        if replica is not None:
            headers["X-data-parallel-rank"] = str(replica)
        if body is not None and not isinstance(body, bytes):
            body, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        connection = self._take(fresh)
        try:
            if connection.sock is None:
                connection.connect()
            if self.dead:  # it died while this connection was made, too late for `hang_up` to end it
                raise ConnectionError("it is dead")
            connection.sock.settimeout(timeout or self.timeout)
            connection.request(method, self._prefix + path, body, headers)
            response = connection.getresponse()
            answer = response.status, response.read()
        except (OSError, HTTPException, ValueError) as error:
            slow = isinstance(error, TimeoutError) and connection.sock is not None
            self._give_back(connection, keep=False)
            reason = f"no answer within {timeout or self.timeout:g} seconds" if slow else str(error) or type(error).__name__
            raise ServerFailedError(reason, final=slow) from error
        self._give_back(connection, keep=not (fresh or response.will_close))
        return answer

    def expect(self, method: str, path: str, body: Any = None, *, fresh: bool = False) -> Any:
        """The JSON of a good answer; anything else is the server's failure."""
        status, raw = self.call(method, path, body, fresh=fresh)
        if status != 200:
            raise ServerFailedError(f"it answers {status}: {self.words(raw)}", answered=status not in GONE)
        return read_json(raw)

    def confirm(self, model: str) -> None:
        """Fails where some connections find no such model: behind the address are several processes, and one of them has it."""
        for _ in range(ASKED):
            listed = self.expect("GET", "/v1/models", fresh=True)
            cards = listed.get("data", []) if isinstance(listed, dict) else []
            if model not in (card.get("id") for card in cards):
                raise ServerFailedError(
                    "not all that answer at this address have loaded the adapter; name each server in rollout.server.urls by an "
                    "address of its own, each with --api-server-count 1",
                    answered=True,
                )

    def words(self, raw: bytes) -> str:
        """What an error answer says, in one line."""
        said = read_json(raw)
        for key in ("error", "message", "detail"):
            if isinstance(said, dict) and key in said:
                said = said[key]
        text = said if isinstance(said, str) else raw.decode(errors="replace")
        text = text.replace(self._key, "[key]") if self._key else text
        return " ".join(text.split())[:300]

    def hang_up(self) -> None:
        """Ends every request in flight: the threads that wait for them wake up with an error."""
        with self._lock:
            idle = [connection for connection, _ in self._idle]
            busy = list(self._busy)
            self._idle.clear()
        for connection in idle:
            connection.close()
        for connection in busy:
            with suppress(OSError, AttributeError):  # closed already, or not open yet
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _take(self, fresh: bool) -> HTTPConnection:
        with self._lock:
            while self._idle and not fresh:
                connection, since = self._idle.pop()
                if time.monotonic() - since < IDLE_SECONDS:
                    break
                connection.close()
            else:
                connection = self._open()
            self._busy.add(connection)
        return connection

    def _give_back(self, connection: HTTPConnection, *, keep: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if keep and not self.dead:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()


def read_json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None


def completion_body(request: Request, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": request.prompt_ids,
        "max_tokens": request.params.max_tokens,
        "temperature": request.params.temperature,
        "seed": request.seed % 2**63,  # the API takes 64 bits with a sign
        "stop_token_ids": list(request.params.stop_ids),
        "ignore_eos": True,  # the protocol's own end tokens are in stop_token_ids
        "logprobs": 0,  # of the sampled token alone
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # spares the server decoding each token
        # All are given: a server would fill gaps from the base's generation_config, which changes the policy.
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def read_completion(answer: Any) -> tuple[list[int], list[float], Any]:
    """Token ids, their log-probabilities and how it ended."""
    try:
        choice = answer["choices"][0]
        tokens, logprobs, finish = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
        pairs = [(int(token), float(logprob)) for token, logprob in zip(tokens, logprobs, strict=True)]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerFailedError("its completion has no token ids or log-probabilities; is it vLLM 0.26 or newer?") from error
    if finish not in ("stop", "length"):  # "abort": the server is going down
        raise ServerFailedError(f"it ended a completion by {finish!r}")
    return [token for token, _ in pairs], [logprob for _, logprob in pairs], finish


def check_server(
    server: Server, base: FrozenBase, rollout: RolloutSection, *, context_tokens: int, first_logp_V: Sequence[float]
) -> None:
    """Refuses, before anything is trained, a server that could not serve this run. `first_logp_V`: what the trainer's own base
    thinks of each token after one end-of-text token."""
    where = f"rollout.server.urls: {server.url}"
    try:
        model = _check_model(server, base, rollout.server.api_key_variable, context_tokens)
        status, _ = server.call("POST", "/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""})
        if status in (404, 405):  # where there is such a route, an empty name is refused with 400
            raise UserError(f"{where} takes no new adapters; start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, or by {SERVE}")
        if rollout.server.adapter_root is None and server.call("GET", PATH)[0] != 200:
            raise UserError(
                f"{where} takes no uploads; start it by {SERVE}, or set rollout.server.adapter_root to a folder that it shares"
            )
        _check_replicas(server, model, base)
        _check_logprobs(server, model, base, rollout.temperature, first_logp_V)
    except ServerFailedError as failed:
        raise UnreachableError(f"{where} cannot be used ({failed}); start it by {SERVE}, or correct the address") from failed


def _check_model(server: Server, base: FrozenBase, key_variable: str, context_tokens: int) -> str:
    """The name of the base on the server. Where a folder is does not matter: its last part is compared."""
    where = f"rollout.server.urls: {server.url}"
    status, raw = server.call("GET", "/v1/models")
    if status in (401, 403):
        raise UserError(f"{where} asks for an API key; put the right one into the environment variable {key_variable}")
    listed = read_json(raw) if status == 200 else None
    cards = [card for card in listed.get("data", []) if not card.get("parent")] if isinstance(listed, dict) else []
    if not cards:
        raise ServerFailedError(f"/v1/models answers {status} and names no model: is it a vLLM server?")
    ours = {PurePath(name).name for name in (base.name, str(base.folder))}
    fitting = [card for card in cards if {PurePath(str(card.get(key))).name for key in ("id", "root")} & ours]
    if not fitting:
        raise UserError(
            f"{where} serves {cards[0].get('id')}, but base.source is {base.name}; serve that one (if it is the same, start the "
            f"server with --served-model-name {base.name})"
        )
    length = fitting[0].get("max_model_len")
    if length and length < context_tokens:
        raise UserError(
            f"{where} has a context of {length} tokens, the team's is {context_tokens}; start it with --max-model-len "
            f"{context_tokens}, or lower team.protocol.context_tokens"
        )
    return str(fitting[0]["id"])


def _check_replicas(server: Server, model: str, base: FrozenBase) -> None:
    """Refuses a data-parallel server: an adapter is loaded by some of its replicas, and nothing tells which. Replicas are asked
    for by number, and vLLM refuses a number that it has not."""
    body = completion_body(Request([base.eos_ids[0]], "", SamplingParams(1.0, 1, ()), seed=0), model)
    second, none_such = (server.call("POST", "/v1/completions", body, replica=number)[0] for number in (1, 10**6))
    if second == 200 != none_such:  # where both are answered, the number is not looked at
        raise UserError(
            f"rollout.server.urls: {server.url} has several data-parallel replicas, and an adapter does not reach them together; "
            "start one server a replica, each without --data-parallel-size, and name them all"
        )


def _check_logprobs(server: Server, model: str, base: FrozenBase, temperature: float, first_logp_V: Sequence[float]) -> None:
    """The likeliest tokens must be as likely as the trainer's base finds them (names prove nothing: other weights may have this
    one), and less so at another temperature: only then is the temperature in the log-probabilities."""
    seen: list[dict[str, float]] = []
    for t in dict.fromkeys((1.0, temperature)):
        request = Request([base.eos_ids[0]], "", SamplingParams(t, 1, ()), seed=0)
        answer = server.expect("POST", "/v1/completions", {**completion_body(request, model), "logprobs": 5})
        read_completion(answer)
        seen.append(answer["choices"][0]["logprobs"].get("top_logprobs", [{}])[0])
    where = f"rollout.server.urls: {server.url}"
    theirs = {int(key.removeprefix("token_id:")): value for key, value in seen[0].items() if key.startswith("token_id:")}
    gaps = sorted(abs(value - first_logp_V[token]) for token, value in theirs.items() if token < len(first_logp_V))
    if gaps and gaps[len(gaps) // 2] > OTHER_WEIGHTS:
        raise UserError(
            f"{where} serves {model} with other weights than base.source = {base.name} (log-probabilities differ by "
            f"{gaps[len(gaps) // 2]:.2g}); serve the same base (or, on a CPU, wait until no other run samples there: vLLM mixes "
            "them up when all its adapter slots are taken)"
        )
    differences = [abs(seen[0][key] - seen[-1][key]) for key in seen[0].keys() & seen[-1].keys()]
    if temperature != 1 and max(differences, default=0.0) < 1e-4:
        raise UserError(
            f"{where} returns log-probabilities without the temperature; start it with "
            "--logprobs-mode processed_logprobs, or use rollout.temperature=1"
        )
