"""The real vLLM in this process, on the device there is, against the transformers engine: same tokens, never a stale one,
failures alone."""

from __future__ import annotations

import importlib.util
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase, load_base
from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import LoraSection, RolloutSection
from teamtr_lora.registry.identity import identify
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.rollout.sampler import Completion, Request, Sampler, SamplingParams
from teamtr_lora.rollout.transformers_engine import TransformersSampler
from teamtr_lora.rollout.vllm import start as vllm_start
from teamtr_lora.rollout.vllm.engine import VllmSampler
from teamtr_lora.rollout.vllm.patches import memory_publish
from teamtr_lora.rollout.vllm.patches.choice import chosen
from teamtr_lora.rollout.vllm.public_interface import EngineParts, FolderAdapters, PublicQueue

installed = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed (tools/setup --all installs it)"
)
CONTEXT = 192
ROLLOUT = RolloutSection(engine="vllm", requests_per_batch=32)
SPECS = {
    "base": LoraSection(rank=8),  # B stays zero: the base itself
    "wide": LoraSection(rank=8, alpha=16),
    "narrow": LoraSection(rank=4, alpha=8, targets=["q_proj", "down_proj"]),
    "stable": LoraSection(rank=6, alpha=12, rslora=True),
}
PROMPTS = [[1, 80, 70, 90, 75], [1, 66], [1, *range(100, 140)], [1, 80, 70, 90, 75, 76]]


@torch.no_grad()
def move(bank: AdapterBank, agent: str, size: float, seed: int) -> AdapterVersion:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in bank.parameters(agent).items():
        if "lora_B" in name:
            parameter.copy_((torch.randn(parameter.shape, generator=generator) * size).to(parameter.device))
    return bank.commit(agent)


@pytest.fixture(scope="module")
def base() -> FrozenBase:
    return load_base("nano", precision="fp32")


@pytest.fixture(scope="module")
def bank(base: FrozenBase) -> AdapterBank:
    bank = AdapterBank(base.model, SPECS, base_name="nano", seed=0)
    for i, agent in enumerate(["wide", "narrow", "stable"]):
        move(bank, agent, 0.2, i)
    return bank


@pytest.fixture(scope="module")
def sampler(base: FrozenBase, bank: AdapterBank) -> Iterator[VllmSampler]:
    environment, threads = dict(os.environ), torch.get_num_threads()
    sampler = VllmSampler(base, bank, ROLLOUT, context_tokens=CONTEXT)
    for agent in bank.agents:
        sampler.publish(bank.version(agent))
    yield sampler
    sampler.close()
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def reference(base: FrozenBase, bank: AdapterBank) -> Callable[[list[Request]], list[Completion]]:
    """The transformers engine with the bank's adapters as they are now."""

    def run_them(requests: list[Request]) -> list[Completion]:
        engine = TransformersSampler(base, bank, context_tokens=CONTEXT)
        for agent in bank.agents:
            engine.publish(bank.version(agent))
        return run(engine, requests)

    return run_them


def request(prompt: list[int], agent: str, *, seed: int = 0, temperature: float = 0.0, tokens: int = 8, stop: int = 2) -> Request:
    return Request(list(prompt), agent, SamplingParams(temperature, tokens, (stop,)), seed)


def run(sampler: Sampler, requests: list[Request]) -> list[Completion]:
    tickets = [sampler.submit(r) for r in requests]
    done: dict[int, Completion] = {}
    while len(done) < len(tickets):
        done.update({c.ticket: c for c in sampler.poll()})
    return [done[ticket] for ticket in tickets]


@installed
def test_greedy_tokens_and_log_probabilities_are_the_transformers_engines(sampler: Any, bank: Any, reference: Any) -> None:
    # four adapters in one batch, with and without a token that ends the message
    requests = [request(prompt, agent, tokens=12, stop=stop) for stop in (0, 2) for prompt in PROMPTS for agent in SPECS]
    for asked, ours, theirs in zip(requests, run(sampler, requests), reference(requests), strict=True):
        assert ours.error is None
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
        assert ours.finish == theirs.finish
        assert ours.version == bank.version(asked.agent).name
    said = {tuple(np.round(c.logprobs, 3)) for c in run(sampler, [request(PROMPTS[2], agent, stop=0) for agent in SPECS])}
    assert len(said) == len(SPECS), "adapters that all say the same prove nothing"


@installed
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_sampled_log_probabilities_are_at_the_sampling_temperature(sampler: Any, bank: Any, temperature: float) -> None:
    asked = request(PROMPTS[2], "wide", temperature=temperature, seed=3, tokens=10, stop=0)
    sampled = run(sampler, [asked])[0]
    bank.activate("wide")
    ids = torch.tensor([asked.prompt_ids + sampled.token_ids], device=bank.model.device)
    with torch.no_grad():
        logits = bank.model(input_ids=ids, use_cache=False).logits[0, len(asked.prompt_ids) - 1 : -1].double()
    expected = torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(asked.prompt_ids) :, None])[:, 0]
    assert sampled.logprobs == pytest.approx(expected.tolist(), abs=1e-3)


@installed
def test_a_seed_alone_decides_the_draw(sampler: Any) -> None:
    asked = request(PROMPTS[0], "wide", temperature=1.0, seed=11, tokens=16, stop=0)
    mates = [request(p, agent, temperature=1.0, seed=s, tokens=9) for s, p in enumerate(PROMPTS) for agent in SPECS]
    alone = run(sampler, [asked])[0]
    among = run(sampler, [*mates[:7], asked, *mates[7:]])[7]
    assert alone.token_ids == among.token_ids
    other = run(sampler, [Request(asked.prompt_ids, "wide", asked.params, 12)])[0]
    assert other.token_ids != alone.token_ids


@installed
def test_thirty_publishes_and_never_a_stale_token(sampler: Any, bank: Any, reference: Any) -> None:
    """Each version is large enough to change what follows a prompt that is already in the prefix cache."""
    asked = request(PROMPTS[2], "wide", tokens=6, stop=0)
    seen: list[list[float]] = []
    used: list[int] = []
    for i in range(30):
        version = move(bank, "wide", 0.3, 100 + i)
        sampler.publish(version)
        got, wanted = run(sampler, [asked])[0], reference([asked])[0]
        assert got.version == version.name
        assert got.token_ids == wanted.token_ids
        assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-3)
        assert all(np.abs(np.subtract(got.logprobs, before)).max() > 0.01 for before in seen), "the version changed nothing"
        seen.append(got.logprobs)
        assert len(sampler.parts.engine.list_loras()) == len(SPECS)
        used.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert used[-1] - used[9] < 2**15, "32 MiB at most for twenty more versions of it"  # in KiB, the peak


@installed
def test_a_version_superseded_while_it_samples_finishes_under_its_own_name(sampler: Any, bank: Any, reference: Any) -> None:
    asked = request(PROMPTS[0], "narrow", tokens=20, stop=0)
    expected, old = reference([asked])[0], bank.version("narrow")
    ticket = sampler.submit(asked)
    sampler._step()  # the prompt and the first token; the rest follows after the publish
    new = move(bank, "narrow", 0.3, 7)
    sampler.publish(new)
    assert len(sampler.parts.engine.list_loras()) == len(SPECS) + 1
    fresh = sampler.submit(asked)
    done: dict[int, Completion] = {}
    while len(done) < 2:
        done.update({c.ticket: c for c in sampler.poll()})
    assert (done[ticket].version, done[fresh].version) == (old.name, new.name)
    assert done[ticket].token_ids == expected.token_ids
    assert done[fresh].token_ids == reference([asked])[0].token_ids
    assert len(sampler.parts.engine.list_loras()) == len(SPECS)


@installed
def test_every_full_block_of_a_message_is_in_the_prefix_cache(sampler: Any) -> None:
    manager = sampler.parts.engine.engine_core.engine_core.scheduler.kv_cache_manager
    assert hasattr(sampler.parts.adapters.manager.punica_wrapper_mapping["language_model"], "chosen_T_S")
    size = manager.coordinator.single_type_managers[0].block_size
    prompt = [8 + i % 90 for i in range(size - 4)]
    (said,) = run(sampler, [request(prompt, "stable", temperature=1.0, stop=0)])
    hits: list[int] = []
    real = manager.get_computed_blocks
    manager.get_computed_blocks = lambda asked: hits.append((found := real(asked))[1]) or found
    try:
        run(sampler, [request(prompt + said.token_ids, "stable")])
    finally:
        manager.get_computed_blocks = real
    assert len(said.token_ids) > 4 and hits == [size]


@installed
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU's memory can be lent; test_vllm_start.py has when it is")
def test_adapters_survive_sleep(sampler: Any) -> None:
    requests = [request(prompt, agent, tokens=12) for prompt in PROMPTS for agent in SPECS]
    before = [c.token_ids for c in run(sampler, requests)]
    with sampler.memory.lent():
        assert sampler.memory.asleep
    assert [c.token_ids for c in run(sampler, requests)] == before and not sampler.memory.asleep


@installed
def test_bad_requests_fail_alone(sampler: Any, reference: Any) -> None:
    good = request(PROMPTS[1], "stable")
    bad = [
        request([1, 10**6], "wide"),
        request([1, -5], "wide"),
        request([], "wide"),
        request([1] * CONTEXT, "wide"),
        request(PROMPTS[0], "nobody"),
        request(PROMPTS[0], "wide", temperature=-1.0),
        request(PROMPTS[0], "wide", temperature=0.001),
        request(PROMPTS[0], "wide", tokens=0),
    ]
    answers = run(sampler, [bad[0], good, *bad[1:], good])
    errors = [a.error for a in answers if a.error]
    assert len(errors) == len(bad)
    assert "token id" in errors[0] and "exceed the context" in errors[3] and "'nobody'" in errors[4]
    expected = reference([good])[0].token_ids
    assert [a.token_ids for a in answers if not a.error] == [expected, expected]


@installed
def test_a_version_that_is_not_in_the_bank_is_refused(sampler: Any, bank: Any) -> None:
    with pytest.raises(RuntimeError, match="the bank holds another version"):
        sampler.publish(AdapterVersion("wide", 999, "0" * 64))


@installed
def test_a_registry_folder_is_served_by_vllms_own_lora_path(sampler: Any, bank: Any, reference: Any, tmp_path: Path) -> None:
    """What `vllm serve --lora-modules NAME=FOLDER` does with it: the folder's own files, through public calls."""
    from vllm.lora.request import LoRARequest

    registry = Registry(tmp_path)
    for number, agent in enumerate(("wide", "narrow", "stable"), 9001):
        stored = registry.publish_adapter(
            "demo", agent, bank.tensors(agent), bank.config(agent), identity=identify("nano"), protocol_hash="0" * 64,
            made_by="train",
        )  # fmt: skip
        lora = LoRARequest(f"{agent}-of-the-registry", number, str(registry.folder("demo", agent, stored.version)))
        engine, queue = sampler.parts.engine, PublicQueue(sampler.parts.engine)
        assert engine.add_lora(lora)
        requests = [request(prompt, agent, tokens=12, stop=0) for prompt in PROMPTS]
        for ticket, asked in enumerate(requests):
            queue.add(1_000_000 + ticket, asked, lora)
        said: dict[int, list[int]] = {}
        while len(said) < len(requests):
            said |= {done.ticket - 1_000_000: done.tokens for done in queue.step()}
        assert [said[i] for i in range(len(requests))] == [theirs.token_ids for theirs in reference(requests)]
        engine.remove_lora(number)


@installed
def test_any_whole_number_is_a_seed_and_hot_requests_fail_alone(sampler: Any) -> None:
    hot = request(PROMPTS[0], "wide", temperature=2.5)
    big, small, refused = run(sampler, [request(PROMPTS[0], "wide", temperature=1.0, seed=s) for s in (2**64 + 3, 3)] + [hot])
    assert big.error is None and small.token_ids == big.token_ids
    assert refused.error == "temperature 2.5 cannot be sampled at by this engine; use 0, or 0.01 to 2"


@installed
@pytest.mark.parametrize(("part", "failure"), [("step", ValueError), ("step", KeyboardInterrupt), ("add", KeyboardInterrupt)])
def test_an_engine_that_was_stopped_in_a_step_is_not_used_again(sampler: Any, monkeypatch: Any, part: str, failure: Any) -> None:
    """What it had scheduled counts as computed: the next request with that prompt would read what was never written."""

    def fail(*_: Any) -> Any:
        raise failure("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(sampler.parts.queue, part, fail)
        ticket = sampler.submit(request(PROMPTS[0], "wide"))
        with pytest.raises(failure, match="in the middle"):
            sampler.poll()
    sampler.submit(request(PROMPTS[0], "wide"))
    for again in (sampler.poll, sampler._drain):
        with pytest.raises(RuntimeError, match="has failed before; open a new one"):
            again()
    sampler.failed = None  # it was the queue that was made to fail, so the engine of the other tests is whole
    said = run(sampler, [])
    while sampler._owner:
        said += sampler.poll()
    assert {c.error for c in said} == {None} and (ticket in {c.ticket for c in said}) == (part == "step")


@installed
def test_memory_publish_does_not_fit_an_engine_whose_layers_are_laid_out_otherwise(sampler: Any, monkeypatch: Any) -> None:
    module = next(iter(sampler.parts.adapters.manager.modules.values()))
    monkeypatch.setattr(module, "lora_a_stacked", (*module.lora_a_stacked, module.lora_a_stacked[0]))
    parts = EngineParts(sampler.parts.engine, sampler.parts.queue, FolderAdapters(sampler.parts.engine))
    assert "parts for" in str(memory_publish.apply(parts)) and isinstance(parts.adapters, FolderAdapters)


@installed
def test_a_target_that_vllm_does_not_wrap_is_named(sampler: Any, bank: Any) -> None:
    tensors = {name.replace("down_proj", "router"): tensor for name, tensor in bank.tensors("narrow").items()}
    with pytest.raises(UserError, match=r"lora.targets: .*router"):
        sampler.parts.adapters._make_plan(0, tensors)


@installed
def test_one_engine_at_a_time_and_none_after_close(base: Any, bank: Any, sampler: Any) -> None:
    """Last of the engine's tests: it closes the one they share."""
    assert sampler.parts.patches == tuple(patch.name for patch in chosen("auto", "0.32", base.device.type))
    with pytest.raises(UserError, match="vLLM cannot run two"):
        VllmSampler(base, bank, RolloutSection(engine="vllm"), context_tokens=CONTEXT)
    sampler.close()
    with pytest.raises(RuntimeError, match="closed"):
        sampler.submit(request(PROMPTS[0], "wide"))


def test_without_vllm_the_error_names_the_extra(base: Any, bank: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(vllm_start.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'teamtr-lora\[vllm\]'"):
        VllmSampler(base, bank, RolloutSection(engine="vllm"), context_tokens=CONTEXT)


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_a_quantised_base_that_vllm_cannot_serve_is_refused(base: Any, bank: Any, quantization: str, monkeypatch: Any) -> None:
    from dataclasses import replace

    monkeypatch.setattr(vllm_start.importlib.util, "find_spec", lambda name: object())
    quantised = replace(base, device=torch.device("cpu"), quantization=quantization)
    with pytest.raises(UserError, match="base.quantization=none, or rollout.engine=transformers"):
        VllmSampler(quantised, bank, RolloutSection(engine="vllm"), context_tokens=CONTEXT)
