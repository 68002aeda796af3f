"""Sampler `vllm_server`: vLLM servers by URL, every agent a LoRA model that requests name.

Token ids go out and come back. Each published version has a model name of its own, never used again, and reaches every server
before it is sampled. A server that fails counts as dead from then on; what it had not finished is asked of the others, with the
same seeds. Each request in flight has a (daemon) thread.
"""

from __future__ import annotations

import atexit
import logging
import queue
import secrets
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save as save_safetensors

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase
from teamtr_lora.base.versions import version_folder, write_version
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import RolloutSection
from teamtr_lora.rollout.adapter_upload import CONFIG_KEY, PATH, config_for_upload
from teamtr_lora.rollout.sampler import Completion, Published, Request, SamplerBase
from teamtr_lora.rollout.server_client import (
    Server,
    ServerFailedError,
    UnreachableError,
    api_key,
    check_server,
    completion_body,
    read_completion,
    read_json,
)

logger = logging.getLogger(__name__)

IN_FLIGHT = 256  # most requests at one server at a time; the rest wait here
UNLOAD_SECONDS = 10.0
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
        key = api_key(section.api_key_variable)
        self._servers = [
            Server(url, key, section.timeout_seconds) for url in dict.fromkeys(url.rstrip("/") for url in section.urls)
        ]
        self._run = secrets.token_hex(4)  # keeps this run's model names and files apart from any other's
        shared = Path(section.adapter_root).expanduser().absolute() if section.adapter_root else None
        self._root = shared / f"teamtr-{self._run}" if shared else None  # a folder of its own: it is emptied again
        self._lock = threading.Lock()  # guards `outstanding` and `dead` of the servers
        self._closed = threading.Event()
        first_logp_V = _first_logprobs(bank, base.eos_ids[0])
        for server in self._servers:  # one that cannot be reached is left out, as long as another one is there
            try:
                check_server(server, base, rollout, context_tokens=context_tokens, first_logp_V=first_logp_V)
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

    def _put(self, published: Published) -> Published:
        version = published.version
        published = replace(published, name=f"{version.agent}.{version.name}.{self._run}-{published.number}")
        self._retired[published.number] = published  # until all servers have it: an interrupted publish is then removed
        self._deliver_everywhere(published)
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
            self._forget(server, *self._live.values(), *self._retired.values())
            server.hang_up()
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
        self._unfinished.clear()
        self._done.clear()
        self._live.clear()
        self._retired.clear()

    # --- adapters

    def _deliver_everywhere(self, published: Published) -> None:
        """Returns when every server that counts as alive has the version."""
        version, agent = published.version, published.version.agent
        tensors, config = self._bank.tensors(agent), self._bank.config(agent)
        source: Path | bytes
        if self._root is not None:
            source = write_version(self._root, version, tensors, config)
        else:
            on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            source = save_safetensors(on_cpu, {"format": "pt", CONFIG_KEY: config_for_upload(config)})

        def deliver(server: Server) -> None:
            try:
                self._deliver(server, published, source)
            except ServerFailedError as failed:
                self._bury(server, f"adapter {published.name} did not reach it: {failed}")

        servers = self._alive()
        with ThreadPoolExecutor(max(1, len(servers))) as pool:
            list(pool.map(deliver, servers))
        if not self._alive():
            raise self._all_dead()

    def _deliver(self, server: Server, published: Published, source: Path | bytes) -> None:
        """Loads the adapter from the shared folder or uploads it; retries once."""
        for attempt in (1, 2):
            try:
                path = str(source)
                if isinstance(source, bytes):
                    stored = server.expect("PUT", f"{PATH}/{published.name}", source)
                    path = stored["path"] if isinstance(stored, dict) and "path" in stored else ""
                server.expect("POST", "/v1/load_lora_adapter", {"lora_name": published.name, "lora_path": path})
                return
            except ServerFailedError as failed:
                if not failed.final:
                    self._forget(server, published)  # it may have come through in part
                if attempt == 2 or failed.final or self._closed.wait(RETRY_SECONDS):
                    raise

    def _drop(self, published: Published) -> None:
        for server in self._alive():
            self._forget(server, published)
        still = {other.version for other in (*self._live.values(), *self._retired.values())}
        if self._root is not None and published.version not in still:
            shutil.rmtree(version_folder(self._root, published.version), ignore_errors=True)

    def _forget(self, server: Server, *versions: Published) -> None:
        with suppress(ServerFailedError):  # if the server is dead, a request will find out
            for published in versions:
                server.call("POST", "/v1/unload_lora_adapter", {"lora_name": published.name}, timeout=UNLOAD_SECONDS)
                if self._root is None:
                    server.call("DELETE", f"{PATH}/{published.name}", timeout=UNLOAD_SECONDS)

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
        while server := self._least_busy():
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

    def _least_busy(self) -> Server | None:
        with self._lock:
            servers = [] if self._closed.is_set() else self._alive()
            server = min(servers, key=lambda server: server.outstanding, default=None)
            if server:
                server.outstanding += 1
        return server

    def _bury(self, server: Server, why: str) -> None:
        with self._lock:
            if server.dead or self._closed.is_set():
                return
            server.dead = why
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
