"""Requests into vLLM's core and tokens out of it, for the versions that `vllm_internals.KNOWN` names.

A small base on a fast GPU waits for Python: vLLM's work per request and token is most of what a rollout costs. `DirectQueue`
leaves out its text front end, and `PlainSteps` most of its scheduler.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from teamtr_lora.rollout.sampler import Request


@dataclass(slots=True)
class Sampled:
    """A request's tokens so far; `finish` is set when there are no more."""

    ticket: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""  # stop, length, or what went wrong


class DirectQueue:
    """Hands requests to the engine's core and takes tokens from it, without tokenizer, detokenizer or text outputs."""

    def __init__(self, engine: Any, make_params: Callable[[Request], Any]) -> None:
        self._engine, self._make_params = engine, make_params
        self._templates: dict[tuple[float, tuple[int, ...]], Any] = {}
        self._open: dict[str, Sampled] = {}
        self._stop_ids: set[int] = set()
        scheduler = engine.engine_core.engine_core.scheduler
        if only_decodes(scheduler):
            PlainSteps(scheduler, self._open, self._stop_ids)

    def add(self, ticket: int, request: Request, lora_request: Any) -> None:
        """Like engine.add_request, from a checked request of the same kind: one per temperature and set of stop ids."""
        kind = (request.params.temperature, request.params.stop_ids)
        if kind not in self._templates:
            self._templates[kind] = self._engine.input_processor.process_inputs(
                "template", {"type": "token", "prompt_token_ids": [0]}, self._make_params(request),
                supported_tasks=self._engine.get_supported_tasks(),
            )  # fmt: skip
            self._stop_ids.update(request.params.stop_ids)
        asked = copy.copy(self._templates[kind])
        asked.sampling_params = copy.copy(asked.sampling_params)
        asked.sampling_params.seed, asked.sampling_params.max_tokens = request.seed % 2**63, request.params.max_tokens
        asked.request_id = asked.external_req_id = str(ticket)
        asked.prompt_token_ids, asked.lora_request = request.prompt_ids, lora_request
        self._engine.engine_core.add_request(asked)
        self._open[asked.request_id] = Sampled(ticket)

    def step(self) -> list[Sampled]:
        """One step of the engine; what finished in it."""
        finished = []
        for output in self._engine.engine_core.get_output().outputs:
            sampled = self._open.get(output.request_id)
            if sampled is None:  # scheduled once more before it was known to be finished
                continue
            sampled.tokens += output.new_token_ids
            if output.new_logprobs is not None:
                sampled.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                sampled.finish = str(output.finish_reason)
                finished.append(self._open.pop(output.request_id))
        return finished

    def settle(self) -> None:
        """Takes back the step that vLLM may have scheduled ahead of the last token."""
        core = self._engine.engine_core.engine_core
        while core.scheduler.has_requests() or core.batch_queue:
            self._engine.engine_core.get_output()


def only_decodes(scheduler: Any) -> bool:
    """Whether a token more is all that happens to its running requests: one kind of cache, no drafts, nothing shared between
    processes, no statistics."""
    caches: Sequence[Any] = getattr(scheduler.kv_cache_manager.coordinator, "single_type_managers", ())
    parallel = scheduler.vllm_config.parallel_config
    return (
        len(caches) == 1
        and type(caches[0]).__name__ == "FullAttentionManager"
        and scheduler.num_spec_tokens == scheduler.num_lookahead_tokens == 0
        and scheduler.connector is None
        and scheduler.ec_connector is None
        and scheduler.policy.name == "FCFS"
        and parallel.pipeline_parallel_size == parallel.data_parallel_size == 1
        and not scheduler.log_stats
    )


class PlainSteps:
    """A scheduler's work for a request that decodes one more token into a block it already holds: two counters when it is
    scheduled, two appends when the token is there. All other requests of the same step (prompts, ends, new and full blocks,
    whatever was preempted) go vLLM's own way, as if they were alone."""

    def __init__(self, scheduler: Any, open_requests: dict[str, Sampled], stop_ids: set[int]) -> None:
        self._scheduler, self._open, self._stop_ids = scheduler, open_requests, stop_ids
        self._block = scheduler.kv_cache_manager.coordinator.single_type_managers[0].block_size
        self._ahead = int(bool(scheduler.scheduler_config.async_scheduling))  # tokens scheduled before the last one is known
        self._limits = [name for name in _LIMITS if hasattr(scheduler, name)]
        self._their_schedule, self._their_update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        scheduler, running = self._scheduler, self._scheduler.running
        plain, others = self._split(running)
        if not plain or scheduler._pause_state:
            return self._their_schedule(*args, **kwargs)
        scheduler.running = list(others)
        limits = [getattr(scheduler, name) for name in self._limits]
        for name, limit in zip(self._limits, limits, strict=True):
            setattr(scheduler, name, limit - len(plain))
        try:
            output = self._their_schedule(*args, **kwargs)
        finally:
            for name, limit in zip(self._limits, limits, strict=True):
                setattr(scheduler, name, limit)
        left = scheduler.running
        if len(left) < len(others):  # some were preempted, and then none is admitted
            gone = set(others).difference(left)
            scheduler.running = [request for request in running if request not in gone]
        else:
            scheduler.running = running + left[len(others) :]
        self._enter(output, running, plain, others)
        return output

    def _split(self, running: list[Any]) -> tuple[list[Any], list[Any]]:
        block, ahead, last = self._block, self._ahead, self._scheduler.max_model_len - 1
        known_to_runner = None if self._scheduler.use_v2_model_runner else self._scheduler.prev_step_scheduled_req_ids
        plain, others = [], []
        for request in running:
            computed, unknown = request.num_computed_tokens, request.num_output_placeholders
            if (
                len(request._all_token_ids) + unknown - computed == 1
                and computed % block
                and (ahead or (computed + 1) % block)  # a full block is entered in the prefix cache here, or in the update
                and computed < last
                and computed + 2 - unknown < request.num_prompt_tokens + request.max_tokens
                and (known_to_runner is None or request.request_id in known_to_runner)
            ):
                plain.append(request)
            else:
                others.append(request)
        return plain, others

    def _enter(self, output: Any, running: list[Any], plain: list[Any], others: list[Any]) -> None:
        """Puts `plain` into the step that vLLM has made for the others, all in the order in which they came."""
        theirs, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        scheduled = {request.request_id: 1 for request in running}
        for request in others:
            if request.request_id not in theirs:
                del scheduled[request.request_id]
        scheduled.update(theirs)
        output.num_scheduled_tokens = scheduled
        output.total_num_scheduled_tokens += len(plain)
        ids = [request.request_id for request in plain]
        cached.req_ids += ids
        cached.new_block_ids += [None] * len(plain)
        cached.num_computed_tokens += [request.num_computed_tokens for request in plain]
        cached.num_output_tokens += [len(request._output_token_ids) + request.num_output_placeholders for request in plain]
        if not self._scheduler.use_v2_model_runner:
            self._scheduler.prev_step_scheduled_req_ids.update(ids)
        for request in plain:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += self._ahead

    def update(self, scheduled: Any, output: Any) -> Any:
        if not output.logprobs or output.logprobs.cu_num_generated_tokens is not None or output.num_nans_in_logits:
            return self._their_update(scheduled, output)
        requests, opened, stop_ids, block, ahead = (
            self._scheduler.requests, self._open, self._stop_ids, self._block, self._ahead,
        )  # fmt: skip
        last = self._scheduler.max_model_len - 1
        index, sampled, logprobs = output.req_id_to_index, output.sampled_token_ids, output.logprobs.logprobs[:, 0].tolist()
        others = {}
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request, message = requests.get(request_id), opened.get(request_id)
            if request is None:  # it ended before this step was known to be needless
                continue
            row = index[request_id]
            tokens, known, said = sampled[row], request._all_token_ids, request._output_token_ids
            if (
                message is None  # not of this queue
                or not said  # the first token ends the prompt's part
                or len(tokens) != 1
                or tokens[0] in stop_ids
                or (len(known) + 1) % block < 2  # a block is full, or entered in the prefix cache
                or len(said) + 1 >= request.max_tokens
                or len(known) >= last
                or request.num_preemptions
            ):
                others[request_id] = count
                continue
            known.append(tokens[0])
            said.append(tokens[0])
            request.num_in_flight_tokens -= count
            request.num_output_placeholders -= ahead
            message.tokens.append(tokens[0])
            message.logprobs.append(logprobs[row])
        rest = copy.copy(scheduled)
        rest.num_scheduled_tokens = others
        return self._their_update(rest, output)


_LIMITS = ("max_num_scheduled_tokens", "max_num_running_reqs", "max_num_active_reqs")  # of a step, that plain requests count in
