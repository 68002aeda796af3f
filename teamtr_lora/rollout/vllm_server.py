"""Sampler `vllm_server`: vLLM servers by URL, every agent a LoRA model that requests name.

Token ids go out and come back. Each published version has a model name of its own, never used again, and reaches every server
before it is sampled: where one refuses it, it is taken off the others again and the versions from before stay live. A server
that does not answer counts as dead; what it had not finished is asked of the others, with the same seeds. It is used again once
it has come back and has every live version. Each request in flight has a (daemon) thread.
"""

from __future__ import annotations

import atexit
import logging
import queue
import secrets
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save as save_safetensors

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase
from teamtr_lora.base.versions import AdapterVersion, version_folder, write_version
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import api_key
from teamtr_lora.recipe import RolloutSection
from teamtr_lora.rollout.adapter_upload import CONFIG_KEY, PATH, config_for_upload
from teamtr_lora.rollout.sampler import Completion, Published, Request, SamplerBase
from teamtr_lora.rollout.server_client import (
    Server,
    ServerFailedError,
    UnreachableError,
    check_server,
    completion_body,
    read_completion,
    read_json,
)

logger = logging.getLogger(__name__)

IN_FLIGHT = 256  # most requests a server at a time; the rest wait here
UNLOAD_SECONDS = 10.0
LOOK_SECONDS = 30.0  # between two looks whether a dead server has come back
KNOCK_SECONDS, CHECK_SECONDS = 2.0, 30.0  # the longest wait for one that may still be gone, and for one that has answered
RETRY_SECONDS = 0.5
REFUSED = (400, 413, 422)  # what a server says of one request, not of itself


@dataclass(frozen=True, slots=True)
class _Job:
    ticket: int
    request: Request
    published: Published  # its name is the model that requests ask for


class ServerSampler(SamplerBase):
    """Implements `Sampler` on vLLM servers."""

    def __init__(self, base: FrozenBase, bank: AdapterBank, rollout: RolloutSection, *, context_tokens: int) -> None:
        super().__init__("vllm_server", bank, vocab_size=base.vocab_size, context_tokens=context_tokens)
        section = rollout.server
        key = api_key(section.api_key_variable, "rollout.server.api_key_variable")
        self._timeout = section.timeout_seconds
        self._server = partial(Server, key=key)
        self._servers = [self._server(url, self._timeout) for url in dict.fromkeys(url.rstrip("/") for url in section.urls)]
        self._homes: dict[int, str] = {}  # by episode: the server that has the beginning of its transcript in its cache
        self._run = secrets.token_hex(4)  # keeps this run's model names and files apart from any other's
        shared = Path(section.adapter_root).expanduser().absolute() if section.adapter_root else None
        self._root = shared / f"teamtr-{self._run}" if shared else None  # a folder of its own: it is emptied again
        self._lock = threading.Lock()  # guards `outstanding`, `dead` and `loaded` of the servers, and `_homes`
        self._closed = threading.Event()
        first_logp_V = _first_logprobs(bank, base.eos_ids[0])
        self._check = partial(check_server, base=base, rollout=rollout, context_tokens=context_tokens, first_logp_V=first_logp_V)
        for server in self._servers:  # one that cannot be reached is left out, as long as another one is there
            try:
                self._check(server)
            except UnreachableError as failed:
                if server is self._servers[-1] and not any(not other.dead for other in self._servers[:-1]):
                    raise
                self._bury(server, str(failed))
        self._threads = 0
        self._unfinished: dict[int, _Job] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[int, Completion | Exception]] = queue.SimpleQueue()
        atexit.register(self.close)  # however the run ends, the servers outlive it and should not keep its adapters

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the connection to the vLLM servers is closed")

    def publish(self, version: AdapterVersion) -> None:
        self._check_open()
        self._readmit()
        super().publish(version)

    def _put(self, published: Published) -> Published:
        version = published.version
        published = replace(published, name=f"{version.agent}.{version.name}.{self._run}-{published.number}")
        self._retired[published.number] = published  # until all servers have it: an interrupted publish is then removed
        self._deliver_everywhere(published)
        with self._lock:
            self._homes.clear()  # what was cached for the version before is of no use
        return self._retired.pop(published.number)

    def _accept(self, ticket: int, request: Request) -> None:
        job = _Job(ticket, request, self._live[request.agent])
        self._unfinished[ticket] = job
        self._running[job.published.number] += 1
        if self._threads < min(len(self._unfinished), IN_FLIGHT * len(self._servers)):
            self._threads += 1
            # daemon: a run that ends by an error must not wait for answers that nobody wants
            threading.Thread(target=self._serve_jobs, name=f"rollout-{self._threads}", daemon=True).start()
        self._jobs.put(job)

    def _work(self) -> None:
        self._readmit()
        while self._unfinished and (not self._done or not self._results.empty()):
            self._finish(*self._results.get())
        self._release()

    def close(self) -> None:
        """Gives up what is in flight and takes this run's adapters off the servers."""
        if self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self.close)
        for _ in range(self._threads):
            self._jobs.put(None)
        for server in self._servers:
            server.hang_up()
        for server in self._alive():
            self._forget(server, *(published.name for published in (*self._live.values(), *self._retired.values())))
            server.hang_up()
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
        self._unfinished.clear()
        self._done.clear()
        self._live.clear()
        self._retired.clear()

    # --- adapters

    def _deliver_everywhere(self, published: Published) -> None:
        """Returns when every server that counts as alive has the version. If one of them refuses, none keeps it."""
        source = self._source(published)

        def deliver(server: Server) -> str:
            try:
                self._deliver(server, published, source)
            except ServerFailedError as failed:
                if failed.answered:
                    return f"{server.url}: {failed}"
                self._bury(server, f"adapter {published.name} did not reach it: {failed}")
            return ""

        servers = self._alive()
        with ThreadPoolExecutor(max(1, len(servers))) as pool:
            refusals = list(filter(None, pool.map(deliver, servers)))
        if refusals:
            self._drop(self._retired.pop(published.number))
            version = published.version
            raise UserError(
                f"rollout.server.urls: {version.agent} {version.name} is live nowhere: {len(refusals)} of {len(servers)} servers "
                f"did not take it ({'; '.join(refusals)}), so it was taken off the others; the last checkpoint is intact: start "
                "that server again, with this recipe, or leave it out, then continue with --resume"
            )
        if not self._alive():
            raise self._all_dead()

    def _source(self, published: Published) -> Path | bytes:
        """The version as servers take it: a folder that they share, or the bytes of an upload."""
        version, agent = published.version, published.version.agent
        tensors, config = self._bank.tensors(agent), self._bank.config(agent)
        if self._root is not None:
            return write_version(self._root, version, tensors, config)
        on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        return save_safetensors(on_cpu, {"format": "pt", CONFIG_KEY: config_for_upload(config)})

    def _deliver(self, server: Server, published: Published, source: Path | bytes) -> None:
        """Loads the adapter from the shared folder or uploads it, and has the server say that it is there; retries once."""
        for attempt in (1, 2):
            try:
                path = str(source)
                if isinstance(source, bytes):
                    stored = server.expect("PUT", f"{PATH}/{published.name}", source)
                    path = stored["path"] if isinstance(stored, dict) and "path" in stored else ""
                server.expect("POST", "/v1/load_lora_adapter", {"lora_name": published.name, "lora_path": path})
                server.confirm(published.name)
                with self._lock:
                    server.loaded.add(published.name)
                return
            except ServerFailedError as failed:
                if not failed.final:
                    self._forget(server, published.name)  # it may have come through in part
                if attempt == 2 or failed.final or self._closed.wait(RETRY_SECONDS):
                    raise

    def _drop(self, published: Published) -> None:
        for server in self._alive():
            self._forget(server, published.name)
        still = {other.version for other in (*self._live.values(), *self._retired.values())}
        if self._root is not None and published.version not in still:
            shutil.rmtree(version_folder(self._root, published.version), ignore_errors=True)

    def _forget(self, server: Server, *names: str) -> None:
        with suppress(ServerFailedError):  # if the server is dead, a request will find out
            for name in names:
                with self._lock:
                    server.loaded.discard(name)
                server.call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, timeout=UNLOAD_SECONDS)
                if self._root is None:
                    server.call("DELETE", f"{PATH}/{name}", timeout=UNLOAD_SECONDS)

    # --- requests

    def _finish(self, ticket: int, result: Completion | Exception) -> None:
        job = self._unfinished.pop(ticket, None)
        if job is None:
            return
        self._running[job.published.number] -= 1
        if isinstance(result, Exception):
            raise result
        self._done.append(result)

    def _serve_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                result: Completion | Exception = self._sample(job)
            except Exception as error:  # poll raises it
                result = error
            self._results.put((job.ticket, result))

    def _sample(self, job: _Job) -> Completion:
        """Asks one server after another until one answers."""
        while server := self._choose(job):
            try:
                return self._ask(server, job)
            except ServerFailedError as failed:
                self._bury(server, str(failed))
            finally:
                with self._lock:
                    server.outstanding -= 1
        raise self._all_dead()

    def _ask(self, server: Server, job: _Job) -> Completion:
        try:
            return self._ask_once(server, job)
        except ServerFailedError as failed:
            if failed.final or server.dead or self._closed.wait(RETRY_SECONDS):
                raise
            return self._ask_once(server, job)

    def _ask_once(self, server: Server, job: _Job) -> Completion:
        model = job.published.name
        status, raw = server.call("POST", "/v1/completions", completion_body(job.request, model))
        if status in REFUSED:
            return Completion(job.ticket, error=f"{server.url} refused the request: {server.words(raw)}")
        if status == 404:
            raise ServerFailedError(f"it no longer has adapter {model}; was it started again?", final=True)
        if status != 200:
            raise ServerFailedError(f"it answers {status}: {server.words(raw)}", final=status in (401, 403))
        answer = read_json(raw)
        tokens, logprobs, finish = read_completion(answer)
        if answer.get("model") != model:
            raise RuntimeError(f"{server.url} answered with model {answer.get('model')!r}, asked was {model!r}")
        return Completion(
            ticket=job.ticket, token_ids=tokens, logprobs=logprobs, version=job.published.version.name, finish=finish
        )

    # --- servers

    def _alive(self) -> list[Server]:
        return [server for server in self._servers if not server.dead]

    def _choose(self, job: _Job) -> Server | None:
        """Of the servers that have the version: the one that played the episode so far, as the beginning of the prompt is in
        its cache, else the least busy."""
        episode = job.request.episode
        with self._lock:
            able = [] if self._closed.is_set() else [s for s in self._alive() if job.published.name in s.loaded]
            at_home = [server for server in able if episode is not None and server.url == self._homes.get(episode)]
            server = min(at_home or able, key=lambda server: server.outstanding, default=None)
            if server:
                server.outstanding += 1
            if server and episode is not None:
                self._homes[episode] = server.url
        return server

    def _readmit(self) -> None:
        """Takes dead servers that have come back into use again, once they have every live version."""
        now, live = time.monotonic(), list(self._live.values())
        in_bank = all(self._bank.version(published.version.agent) == published.version for published in live)
        for place, server in enumerate(self._servers):
            if not server.dead or not in_bank or now < server.look_at:
                continue
            server.look_at = now + LOOK_SECONDS
            back = self._server(server.url, min(CHECK_SECONDS, self._timeout))
            try:
                back.call("GET", "/health", timeout=KNOCK_SECONDS)
                # it may never have been down, only out of reach
                self._forget(back, *server.loaded | {published.name for published in live})
                self._check(back)
                for published in live:
                    self._deliver(back, published, self._source(published))
            except (ServerFailedError, UnreachableError):
                continue  # it stays dead, for the reason that was told
            except UserError as unfit:
                if str(unfit) != server.dead:
                    logger.warning("%s has come back, and is not used: %s", server.url, unfit)
                server.dead = str(unfit)
                continue
            back.timeout, back.deaths = self._timeout, server.deaths
            self._servers[place] = back
            logger.warning("rollout server %s has come back; it has the %d live adapters and is used again", back.url, len(live))

    def _bury(self, server: Server, why: str) -> None:
        with self._lock:
            if server.dead or self._closed.is_set():
                return
            server.dead = why
            server.look_at = time.monotonic() + LOOK_SECONDS * 2**server.deaths  # one that fails again and again is left alone
            server.deaths += 1
        left = len(self._alive())
        others = f"{left} of {len(self._servers)} are left and take over its requests" if left else "no other is left"
        logger.warning("rollout server %s counts as dead (%s); %s", server.url, why, others)
        server.hang_up()

    def _all_dead(self) -> UserError:
        reasons = "; ".join(f"{server.url}: {server.dead}" for server in self._servers)
        return UserError(
            f"rollout.server.urls: no server is left ({reasons}); the last checkpoint is intact: start the servers again, with "
            "this recipe, then continue with --resume"
        )


@torch.no_grad()
def _first_logprobs(bank: AdapterBank, token: int) -> list[float]:
    """Log-probabilities after one token, by the trainer's own model. When a sampler is opened the adapters are still fresh, and
    do nothing, so these are the base's."""
    ids = torch.tensor([[token]], device=next(bank.model.parameters()).device)
    logits: torch.Tensor = bank.model(input_ids=ids).logits[0, -1]
    return torch.log_softmax(logits.float(), -1).tolist()
