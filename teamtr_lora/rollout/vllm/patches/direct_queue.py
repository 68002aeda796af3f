"""Patch `direct_queue`: requests go straight into vLLM's engine core, and tokens come straight out of it.

Replaces: `LLMEngine.add_request` and `LLMEngine.step`, that is vLLM's front end: checking every request and its sampling
parameters, and building text outputs for every token of every request.
Why: a small base on a fast GPU waits for Python, and this is a large part of vLLM's Python. A request here is a copy of one that
vLLM has checked: there is one such template for each temperature and set of stop tokens.
Worth: 32k tokens/s with it, 22k without it and without decode_schedule, which builds on it (SmolLM2-135M, one H200), by
`tools/bench_rollout.py --base SMOLLM2 --episodes 512 --prompt-tokens 32 --message-tokens 24 --repeats 2 --parts patches`.
Knows: vLLM 0.26 and 0.32.
Other versions: `PublicQueue`, the public calls.
"""

from __future__ import annotations

import copy
from typing import Any

from teamtr_lora.rollout.sampler import Request
from teamtr_lora.rollout.vllm.patches.patch import Patch
from teamtr_lora.rollout.vllm.public_interface import EngineParts, PublicQueue, Sampled, sampling_params


class DirectQueue(PublicQueue):
    """The same on the engine's core, without tokenizer, detokenizer or text outputs."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._templates: dict[tuple[float, tuple[int, ...]], Any] = {}
        self.open: dict[str, Sampled] = {}  # unfinished requests by vLLM's id for them
        self.stop_ids: set[int] = set()  # of all requests so far

    def add(self, ticket: int, request: Request, lora_request: Any) -> None:
        kind = (request.params.temperature, request.params.stop_ids)
        if kind not in self._templates:
            self._templates[kind] = self._engine.input_processor.process_inputs(
                "template", {"type": "token", "prompt_token_ids": [0]}, sampling_params(request),
                supported_tasks=self._engine.get_supported_tasks(),
            )  # fmt: skip
            self.stop_ids.update(request.params.stop_ids)
        asked = copy.copy(self._templates[kind])
        asked.sampling_params = copy.copy(asked.sampling_params)
        asked.sampling_params.seed, asked.sampling_params.max_tokens = request.seed % 2**63, request.params.max_tokens
        asked.request_id = asked.external_req_id = str(ticket)
        asked.prompt_token_ids, asked.lora_request = request.prompt_ids, lora_request
        self._engine.engine_core.add_request(asked)
        self.open[asked.request_id] = Sampled(ticket)

    def step(self) -> list[Sampled]:
        finished = []
        for output in self._engine.engine_core.get_output().outputs:
            sampled = self.open.get(output.request_id)
            if sampled is None:  # vLLM had scheduled another token before it saw that the request was finished
                continue
            sampled.tokens += output.new_token_ids
            if output.new_logprobs is not None:
                sampled.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                sampled.finish = str(output.finish_reason)
                finished.append(self.open.pop(output.request_id))
        return finished

    def settle(self) -> None:
        """Takes back the step that vLLM may have scheduled ahead of the last token."""
        core = self._engine.engine_core.engine_core
        while core.scheduler.has_requests() or core.batch_queue:
            self._engine.engine_core.get_output()


def apply(parts: EngineParts) -> None:
    parts.queue = DirectQueue(parts.engine)


PATCH = Patch(name="direct_queue", apply=apply)
