"""Patch `decode_schedule` against vLLM's own scheduler: the same requests, played with a runner that checks each step."""

from __future__ import annotations

import importlib.util
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from teamtr_lora.rollout.vllm.patches.decode_schedule import PlainSteps, only_decodes
from teamtr_lora.rollout.vllm.public_interface import Sampled

installed = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
BLOCK, CONTEXT, STOP = 16, 160, 3


def token_after(request_id: str, position: int) -> int:
    """What the runner samples there: a stop token now and then."""
    draw = random.Random(f"{request_id} {position}").randrange(100)
    return STOP if draw < 3 else 10 + draw


@dataclass
class Held:
    """A request as the runner holds it."""

    tokens: list[int]
    computed: int
    blocks: list[int]


@dataclass
class Runner:
    held: dict[str, Held] = field(default_factory=dict)

    def run(self, step: Any) -> Any:
        for request_id in {*step.finished_req_ids, *(step.preempted_req_ids or ())}:
            self.held.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            known = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            self.held[new.req_id] = Held(list(known), new.num_computed_tokens, list(new.block_ids[0]))
        cached = step.scheduled_cached_reqs
        assert len(cached.req_ids) == len(cached.num_output_tokens)
        for request_id, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                self.held[request_id] = Held(list(cached.all_token_ids[request_id]), computed, list(blocks[0]))
            elif blocks is not None:
                self.held[request_id].blocks += blocks[0]
            assert self.held[request_id].computed == computed
        counts = step.num_scheduled_tokens
        assert set(counts) == {*cached.req_ids, *(new.req_id for new in step.scheduled_new_reqs)}
        assert step.total_num_scheduled_tokens == sum(counts.values()) <= CONTEXT
        written: list[int] = []
        sampled = [self._compute(self.held[request_id], request_id, count, written) for request_id, count in counts.items()]
        assert len(written) == len(set(written)), "two requests write to one block"
        logprobs = np.array([-0.01 * len(self.held[request_id].tokens) for request_id in counts]).reshape(-1, 1)
        ids = list(counts)
        return SimpleNamespace(
            req_ids=ids, req_id_to_index={request_id: i for i, request_id in enumerate(ids)}, sampled_token_ids=sampled,
            logprobs=logprobs_of(logprobs), prompt_logprobs_dict={}, prompt_token_id_logprobs_dict={}, pooler_output=None,
            num_nans_in_logits=None, kv_connector_output=None, ec_connector_output=None, cudagraph_stats=None,
            routed_experts=None, sampling_masks=None, aux_output_connector_output=None,
        )  # fmt: skip

    def _compute(self, held: Held, request_id: str, count: int, written: list[int]) -> list[int]:
        first, after = held.computed, held.computed + count
        assert after <= len(held.tokens) <= len(held.blocks) * BLOCK
        written += held.blocks[first // BLOCK : (after - 1) // BLOCK + 1]
        held.computed = after
        if after < len(held.tokens):  # a part of a prompt
            return []
        held.tokens.append(token_after(request_id, after))
        return held.tokens[-1:]


def logprobs_of(logprobs: np.ndarray) -> Any:
    from vllm.v1.outputs import LogprobsLists

    count = len(logprobs)
    return LogprobsLists(np.zeros((count, 1), dtype=np.int64), logprobs, np.zeros(count, dtype=np.int64))


def make_scheduler(folder: Path, *, ahead: bool, blocks: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = EngineArgs(
        model=str(folder), max_model_len=CONTEXT, max_num_seqs=8, max_num_batched_tokens=CONTEXT, skip_tokenizer_init=True,
        enable_prefix_caching=True, enforce_eager=True, distributed_executor_backend="uni",
    ).create_engine_config()  # fmt: skip
    config.scheduler_config.async_scheduling = ahead
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    scheduler = (AsyncScheduler if ahead else Scheduler)(config, caches, StructuredOutputManager(config), BLOCK, BLOCK)
    scheduler.use_v2_model_runner = ahead  # the runner of a GPU, and that of a CPU
    return scheduler


def requests_of(seed: int) -> list[Any]:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    draw = random.Random(seed)
    shared = [draw.randrange(10, 99) for _ in range(BLOCK + 5)]
    made = []
    for i in range(40):
        prompt = shared[: draw.randrange(len(shared))] + [draw.randrange(10, 99) for _ in range(draw.randrange(1, 40))]
        most = draw.choice([1, 2, 30, 60, CONTEXT])
        params = SamplingParams(max_tokens=most, ignore_eos=True, stop_token_ids=[STOP], logprobs=0)
        made.append(Request(f"{i}", prompt, params, None, block_hasher=hasher))
    return made


def play(scheduler: Any, requests: list[Any], *, ahead: bool, plain: bool) -> tuple[dict[str, Any], int]:
    """What each request said, and how it ended; requests come a few at a time. Also the tokens that vLLM's update did not see."""
    said: dict[str, Sampled] = {}
    runner, in_flight, coming, own = Runner(), deque[Any](), deque(requests), 0
    if plain:
        assert only_decodes(scheduler)
        PlainSteps(scheduler, said, {STOP})
    while coming or in_flight or scheduler.has_requests():
        for _ in range(min(3, len(coming))):
            request = coming.popleft()
            said[request.request_id] = Sampled(int(request.request_id))
            scheduler.add_request(request)
        if scheduler.has_requests():
            step = scheduler.schedule()
            in_flight.append((step, runner.run(step)))
        if len(in_flight) > ahead or not scheduler.has_requests():
            step, output = in_flight.popleft()
            outputs = scheduler.update_from_output(step, output)
            told = [out for some in outputs.values() for out in some.outputs]
            own += len(step.num_scheduled_tokens) - len(told)
            for out in told:
                message = said[out.request_id]
                message.tokens += out.new_token_ids
                message.logprobs += out.new_logprobs.logprobs[:, 0].tolist()
                message.finish = "" if out.finish_reason is None else str(out.finish_reason)
    return {name: (m.tokens, m.logprobs, m.finish) for name, m in said.items()}, own


@installed
@pytest.mark.parametrize("blocks", [400, 24], ids=["room for all", "some are preempted"])
@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "a step ahead"])
def test_plain_steps_say_what_vllms_own_scheduler_says(tiny_base: Path, ahead: bool, blocks: int) -> None:
    told: list[Any] = []
    for plain in (False, True):
        scheduler = make_scheduler(tiny_base, ahead=ahead, blocks=blocks)
        requests = requests_of(seed=blocks)
        said, own = play(scheduler, requests, ahead=ahead, plain=plain)
        pool = scheduler.kv_cache_manager.block_pool
        cached = len(pool.cached_block_hash_to_block) if blocks == 400 else 0  # what is preempted is cached at other times
        told.append((said, pool.get_num_free_blocks(), len(scheduler.running), len(scheduler.requests), cached))
        preempted = sum(request.num_preemptions for request in requests)
        tokens = sum(len(tokens) for tokens, _, _ in said.values())
        assert (own > 0.5 * tokens) == plain, "most tokens are plain"
        assert (preempted > 0) == (blocks == 24)
    assert told[0] == told[1]
    for name, (tokens, logprobs, finish) in told[1][0].items():
        prompt = requests[int(name)].num_prompt_tokens
        assert tokens == [token_after(name, prompt + i) for i in range(len(tokens))]
        assert logprobs == pytest.approx([-0.01 * (prompt + i + 1) for i in range(len(tokens))])
        assert finish == ("stop" if tokens[-1] == STOP else "length") and STOP not in tokens[:-1]


@installed
def test_what_a_scheduler_must_not_do_besides(tiny_base: Path) -> None:
    scheduler = make_scheduler(tiny_base, ahead=False, blocks=24)
    assert only_decodes(scheduler)
    for name, other in [("num_spec_tokens", 1), ("log_stats", True), ("connector", object()), ("ec_connector", object())]:
        kept = getattr(scheduler, name)
        setattr(scheduler, name, other)
        assert not only_decodes(scheduler), name
        setattr(scheduler, name, kept)
