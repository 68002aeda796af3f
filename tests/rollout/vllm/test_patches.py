"""Which patches an engine gets, and that each one, alone, changes no token."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase, load_base
from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import LoraSection, RecipeError, RolloutSection, load_recipe
from teamtr_lora.recipe.engine_facts import PatchName
from teamtr_lora.rollout.sampler import Completion, Request, Sampler, SamplingParams
from teamtr_lora.rollout.transformers_engine import TransformersSampler
from teamtr_lora.rollout.vllm import start as vllm_start
from teamtr_lora.rollout.vllm.engine import VllmSampler
from teamtr_lora.rollout.vllm.patches import choice
from teamtr_lora.rollout.vllm.patches.choice import PATCHES, chosen
from teamtr_lora.rollout.vllm.public_interface import FolderAdapters, PublicQueue

CONTEXT = 192
SPECS = {"base": LoraSection(rank=8), "wide": LoraSection(rank=8, alpha=16), "narrow": LoraSection(rank=4, targets=["q_proj"])}
PROMPTS = [[1, 80, 70, 90, 75], [1, 66], [1, *range(100, 140)]]
FOLDER = Path(choice.__file__).parent


# --- the choice


def names(setting: Any, version: str, device: str) -> list[str]:
    return [patch.name for patch in chosen(setting, version, device)]


def test_auto_takes_what_knows_the_version_and_fits_the_device() -> None:
    assert names("auto", "0.26.0", "cuda") == names("auto", "0.32.0+cpu", "cuda") == list(PATCHES)
    assert names("auto", "0.32.1", "cpu") == [name for name in PATCHES if name != "token_map"]
    assert names("none", "0.26.0", "cuda") == []
    assert names(["decode_schedule", "direct_queue"], "0.26.0", "cuda") == ["direct_queue", "decode_schedule"]


@pytest.mark.parametrize("version", ["0.27.1", "0.29.0", "0.31.0", "0.3.2"])
def test_other_versions_run_on_the_public_interface_and_say_so_once(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert names("auto", version, "cpu") == []
        assert names("none", version, "cpu") == []
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(
        f"vLLM {version}: patches close_memory, lora_layers, direct_queue, decode_schedule, memory_publish are"
    )
    assert "for 0.26 and 0.32" in said and "tools/bench_rollout.py" in said


def test_without_one_that_others_need_they_go_too(monkeypatch: Any) -> None:
    from dataclasses import replace

    older = replace(PATCHES["memory_publish"], versions=("0.26",))
    monkeypatch.setitem(PATCHES, "memory_publish", older)
    assert names("auto", "0.32.0", "cuda") == ["close_memory", "lora_layers", "direct_queue", "decode_schedule"]


@pytest.mark.parametrize(
    ("setting", "version", "device", "message"),
    [
        (["direct_queue"], "0.29.0", "cpu", "direct_queue: it is for vLLM 0.26 and 0.32, and this is 0.29.0; leave it out"),
        (["memory_publish", "token_map"], "0.32.0", "cpu", "token_map: it is for GPUs, and the base is on cpu"),
    ],
)
def test_a_named_patch_that_cannot_be_applied_is_an_error(setting: Any, version: str, device: str, message: str) -> None:
    with pytest.raises(UserError, match=f"rollout.vllm.patches = {message}"):
        chosen(setting, version, device)


def test_every_patch_is_one_file_that_says_what_it_is() -> None:
    assert tuple(PATCHES) == get_args(PatchName), "the recipe's list and the table"
    helpers = {"__init__", "choice", "patch", "lora_kernel"}
    assert {path.stem for path in FOLDER.glob("*.py")} - helpers == set(PATCHES)
    for name, patch in PATCHES.items():
        module = importlib.import_module(f"teamtr_lora.rollout.vllm.patches.{name}")
        assert patch is module.PATCH
        said = str(module.__doc__)
        assert said.startswith(f"Patch `{name}`: ")
        assert all(f"\n{word}:" in said for word in ("Replaces", "Why", "Worth", "Knows", "Other versions")), name
        assert "tools/bench_rollout.py" in said, "the command that measures it"
        assert f"Knows: vLLM {' and '.join(patch.versions)}.\n" in said
        assert set(patch.needs) <= set(PATCHES)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[direct_qeue]", "did you mean 'direct_queue'?"),
        ("[decode_schedule]", "decode_schedule builds on direct_queue; add that one, or leave both out"),
        ("nnone", "did you mean 'none'?"),
        ("lora_layers", "or a list of one of close_memory, lora_layers"),
        ("7", "must be one of auto, none or a list of one of close_memory"),
    ],
)
def test_a_recipe_that_names_no_patch_is_told_the_nearest(value: str, words: str) -> None:
    recipe = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, [f"rollout.vllm.patches={value}"])
    assert words in str(caught.value)


def test_a_recipe_takes_auto_none_and_names() -> None:
    for value in ("auto", "none", ["direct_queue", "lora_layers"], []):
        assert RolloutSection.model_validate({"vllm": {"patches": value}}).vllm.patches == value


# --- engines with one patch each

installed = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed (tools/setup --all installs it)"
)
only_on_a_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU vLLM's own LoRA kernels take 16 bits only, which says other tokens"
)


@torch.no_grad()
def move(bank: AdapterBank, agent: str, seed: int) -> AdapterVersion:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in bank.parameters(agent).items():
        if "lora_B" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return bank.commit(agent)


@pytest.fixture(scope="module")
def base() -> FrozenBase:
    return load_base("nano", device="cpu", precision="fp32")


@pytest.fixture(scope="module")
def bank(base: FrozenBase) -> AdapterBank:
    bank = AdapterBank(base.model, SPECS, base_name="nano", seed=0)
    for seed, agent in enumerate(["wide", "narrow"]):
        move(bank, agent, seed)
    return bank


@pytest.fixture(scope="module", autouse=True)
def as_it_was() -> Iterator[None]:
    environment, threads = dict(os.environ), torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)


def request(prompt: list[int], agent: str, *, temperature: float = 0.0, tokens: int = 10, seed: int = 0) -> Request:
    return Request(list(prompt), agent, SamplingParams(temperature, tokens, (2,)), seed)


def run(sampler: Sampler, requests: list[Request]) -> list[Completion]:
    tickets = [sampler.submit(asked) for asked in requests]
    done: dict[int, Completion] = {}
    while len(done) < len(tickets):
        done |= {completion.ticket: completion for completion in sampler.poll()}
    return [done[ticket] for ticket in tickets]


def published(sampler: Any, bank: AdapterBank) -> Any:
    for agent in bank.agents:
        sampler.publish(bank.version(agent))
    return sampler


def open_vllm(base: FrozenBase, bank: AdapterBank, patches: Any) -> VllmSampler:
    rollout = RolloutSection.model_validate({"engine": "vllm", "requests_per_batch": 16, "vllm": {"patches": patches}})
    sampler: VllmSampler = published(VllmSampler(base, bank, rollout, context_tokens=CONTEXT), bank)
    return sampler


def greedy() -> list[Request]:
    return [request(prompt, agent) for prompt in PROMPTS for agent in SPECS]


def assert_same(ours: list[Completion], theirs: list[Completion]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.error is None and (one.token_ids, one.finish, one.version) == (other.token_ids, other.finish, other.version)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


SINGLE = [["close_memory"], ["lora_layers"], ["direct_queue"], ["direct_queue", "decode_schedule"], ["memory_publish"]]


@installed
@only_on_a_cpu
@pytest.mark.parametrize("patches", SINGLE, ids=lambda patches: patches[-1])
def test_each_patch_alone_says_what_the_transformers_engine_says(base: FrozenBase, bank: AdapterBank, patches: list[str]) -> None:
    assert {name for some in SINGLE for name in some} == {p.name for p in chosen("auto", "0.32", "cpu")}, "none is left out"
    sampler, reference = open_vllm(base, bank, patches), published(TransformersSampler(base, bank, context_tokens=CONTEXT), bank)
    try:
        assert sampler.parts.patches == tuple(patches)
        assert_same(run(sampler, greedy()), run(reference, greedy()))
        alone = run(sampler, [drawn := request(PROMPTS[0], "wide", temperature=1.0, tokens=16, seed=11)])
        assert_same(run(sampler, [*greedy(), drawn])[-1:], alone)  # the seed decides the draw, not the batch
        version = move(bank, "wide", 7)
        sampler.publish(version)
        reference.publish(version)
        assert_same(run(sampler, greedy()), run(reference, greedy()))  # nothing of the version before is left
        assert len(sampler.parts.engine.list_loras()) == len(SPECS)
    finally:
        sampler.close()


@installed
@only_on_a_cpu
def test_without_patches_all_works_on_the_public_interface(base: FrozenBase, bank: AdapterBank, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="no queue"):
        patch.setattr(vllm_start, "_apply", lambda *_: (_ for _ in ()).throw(ValueError("no queue")))
        open_vllm(base, bank, "none")  # what was started is closed, or the next could not start
    sampler, reference = open_vllm(base, bank, "none"), published(TransformersSampler(base, bank, context_tokens=CONTEXT), bank)
    try:
        assert sampler.parts.patches == () and not sampler.parts.engine.vllm_config.additional_config
        assert isinstance(sampler.parts.queue, PublicQueue) and isinstance(sampler.parts.adapters, FolderAdapters)
        assert_same(run(sampler, greedy()), run(reference, greedy()))
        folder = sampler.parts.adapters.folder
        version, kept = bank.version("narrow"), bank.snapshot("narrow")
        ticket = sampler.submit(request(PROMPTS[0], "narrow", tokens=40))
        sampler._step()
        sampler.publish(move(bank, "narrow", 5))
        bank.load(version, kept)
        sampler.publish(version)  # while the first of that name still samples
        while ticket not in {done.ticket for done in sampler.poll()}:
            pass
        assert_same(run(sampler, greedy()), run(reference, greedy()))
        assert len(list(folder.iterdir())) == len(sampler.parts.engine.list_loras()) == len(SPECS), "superseded versions are gone"
    finally:
        sampler.close()
    assert not folder.exists()
