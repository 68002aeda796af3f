"""AdapterBank: who owns which tensor, and that weights come back bit for bit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import load_base
from teamtr_lora.base.versions import write_version
from teamtr_lora.common.errors import UserError

IDS = torch.tensor([[5, 17, 101, 42, 9, 200, 33], [8, 8, 90, 41, 250, 3, 60]])


def lora(rank: int = 4, alpha: float = 8.0, targets: Any = "all-linear", rslora: bool = False, dora: bool = False) -> Any:
    return SimpleNamespace(rank=rank, alpha=alpha, targets=targets, rslora=rslora, dora=dora)


MIXED = {
    "planner": lora(4, 8.0, "all-linear"),
    "solver": lora(2, 3.0, ["q_proj", "v_proj"]),
    "checker": lora(8, 16.0, ["model.layers.1.mlp.down_proj", "o_proj"], rslora=True),
}


def make(base: Path, specs: dict[str, Any] | None = None, precision: str = "fp32", seed: int = 0) -> AdapterBank:
    model = load_base(str(base), precision=precision, device="cpu").model
    return AdapterBank(model, specs or MIXED, base_name="tiny", seed=seed)


def fill(bank: AdapterBank, agent: str, seed: int = 1, scale: float = 0.05) -> None:
    """A trained-looking adapter: neither factor is zero."""
    generator = torch.Generator().manual_seed(seed)
    bank.restore(agent, {n: scale * torch.randn(p.shape, generator=generator) for n, p in bank.parameters(agent).items()})


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def logits(bank: AdapterBank, agent: str) -> Tensor:
    bank.activate(agent)
    with torch.no_grad():
        return bank.model(input_ids=IDS).logits


def test_every_adapter_tensor_has_exactly_one_owner(tiny_base: Path) -> None:
    bank = make(tiny_base)
    owners: dict[int, list[str]] = {}
    for agent in bank.agents:
        for parameter in bank.parameters(agent).values():
            owners.setdefault(id(parameter), []).append(agent)
    assert all(len(names) == 1 for names in owners.values())
    adapters = {id(p) for n, p in bank.model.named_parameters() if "lora_" in n}
    assert adapters == set(owners)
    shapes = {agent: {p.shape[0] for n, p in bank.parameters(agent).items() if "lora_A" in n} for agent in bank.agents}
    assert shapes == {"planner": {4}, "solver": {2}, "checker": {8}}
    assert len(bank.parameters("planner")) == 2 * 7 * 2  # seven linear layers in each of two decoder layers, A and B
    assert len(bank.parameters("solver")) == 2 * 2 * 2
    assert len(bank.parameters("checker")) == 2 * (1 + 2)
    assert not any(p.requires_grad for p in bank.model.parameters())


def test_training_gives_gradients_to_the_agents_own_tensors_only(tiny_base: Path) -> None:
    bank = make(tiny_base)
    for agent in bank.agents:
        fill(bank, agent)
    for agent in ("solver", "checker", "planner"):
        with bank.training(agent) as parameters:
            assert {id(p) for p in bank.model.parameters() if p.requires_grad} == {id(p) for p in parameters}
            bank.model(input_ids=IDS).logits.square().mean().backward()
            with_gradient = {n for n, p in bank.model.named_parameters() if p.grad is not None}
            assert len(with_gradient) == len(parameters)
            assert all(f"agent_{agent}" in n for n in with_gradient)
            assert all(float(p.grad.abs().sum()) > 0 for p in parameters if p.grad is not None)
        assert not any(p.requires_grad or p.grad is not None for p in bank.model.parameters())


def test_training_leaves_nothing_behind_when_it_fails(tiny_base: Path) -> None:
    bank = make(tiny_base)
    with pytest.raises(ZeroDivisionError), bank.training("solver"):
        raise ZeroDivisionError
    assert not any(p.requires_grad or p.grad is not None for p in bank.model.parameters())


def test_only_the_active_adapter_acts(tiny_base: Path) -> None:
    bank = make(tiny_base)
    with torch.no_grad():
        plain = load_base(str(tiny_base), device="cpu").model(input_ids=IDS).logits
    assert all(torch.equal(logits(bank, agent), plain) for agent in bank.agents), "a fresh adapter is the base"
    fill(bank, "solver")
    assert torch.equal(logits(bank, "planner"), plain) and torch.equal(logits(bank, "checker"), plain)
    assert (logits(bank, "solver") - plain).abs().max() > 1e-3


def test_snapshot_and_restore_are_bit_exact(tiny_base: Path) -> None:
    bank = make(tiny_base)
    fill(bank, "checker")
    before = bank.snapshot("checker")
    kept = bits(before)
    fill(bank, "checker", seed=2)
    assert bits(before) == kept, "a snapshot is a copy"
    bank.restore("checker", before)
    assert bits(bank.tensors("checker")) == kept
    bank.parameters("checker")[next(iter(before))].data.add_(1)
    assert bits(before) == kept, "restoring copies too"


def test_interpolation_is_bit_exact_at_both_ends_and_linear_between(tiny_base: Path) -> None:
    bank = make(tiny_base)
    fill(bank, "solver", seed=1)
    current = bank.snapshot("solver")
    fill(bank, "solver", seed=2)
    candidate = bank.snapshot("solver")
    bank.interpolate("solver", current, candidate, 0.0)
    assert bits(bank.tensors("solver")) == bits(current)
    bank.interpolate("solver", current, candidate, 1.0)
    assert bits(bank.tensors("solver")) == bits(candidate)
    for alpha in (0.3, 1.7):
        bank.interpolate("solver", current, candidate, alpha)
        for name, tensor in bank.tensors("solver").items():
            wanted = current[name].double() + alpha * (candidate[name].double() - current[name].double())
            assert torch.allclose(tensor.double(), wanted, rtol=1e-6, atol=1e-8)


def test_interpolation_at_zero_is_the_current_adapter_whatever_the_candidate_is(tiny_base: Path) -> None:
    """A diverged candidate (infinite, NaN) or a negative zero must not reach the adapter at alpha = 0."""
    bank = make(tiny_base)
    fill(bank, "solver")
    current = bank.snapshot("solver")
    first = next(iter(current))
    current[first].view(-1)[0] = -0.0
    for wrong in (torch.inf, torch.nan, 1.0):
        bank.interpolate("solver", current, {n: torch.full_like(t, wrong) for n, t in current.items()}, 0.0)
        assert bits(bank.tensors("solver")) == bits(current), wrong


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (lora(rank=65), ["solver", "rank", "65", "at most"]),
        (lora(rank=33, targets=["q_proj", "k_proj"]), ["solver", "rank", "33", "k_proj", "32"]),
        (lora(targets=["q_porj"]), ["solver", "targets", "q_porj", "q_proj"]),
        (lora(targets=["lm_head"]), ["solver", "targets", "lm_head"]),
        (lora(targets=["q_proj", "embed_tokens"]), ["solver", "targets", "embed_tokens"]),
    ],
)
def test_adapters_that_do_not_fit_are_refused(tiny_base: Path, spec: Any, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        make(tiny_base, {"planner": lora(), "solver": spec})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_largest_rank_that_fits_is_taken(tiny_base: Path) -> None:
    assert make(tiny_base, {"a": lora(rank=32)}).agents == ["a"]


def test_a_snapshot_of_another_shape_is_refused(tiny_base: Path) -> None:
    bank, other = make(tiny_base), make(tiny_base, {"solver": lora(3, 3.0, ["q_proj", "v_proj"])})
    before = bits(bank.tensors("solver"))
    with pytest.raises(UserError, match="lora.rank"):
        bank.restore("solver", other.snapshot("solver"))
    with pytest.raises(UserError, match="one side only"):
        bank.restore("solver", bank.snapshot("planner"))
    wrong = {name: torch.ones_like(t) for name, t in bank.snapshot("solver").items()}
    wrong[list(wrong)[-1]] = torch.ones(1, 1)
    with pytest.raises(UserError, match="shape"):
        bank.restore("solver", wrong)
    assert bits(bank.tensors("solver")) == before


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_adapter_weights_are_fp32_on_a_half_precision_base(tiny_base: Path, precision: str) -> None:
    bank = make(tiny_base, precision=precision)
    owned = [p for agent in bank.agents for p in bank.parameters(agent).values()]
    assert {p.dtype for p in owned} == {torch.float32}
    rest = [p for n, p in bank.model.named_parameters() if "lora_" not in n]
    assert {p.dtype for p in rest} == {torch.bfloat16 if precision == "bf16" else torch.float16}


def test_the_start_depends_on_the_seed_and_the_name_only(tiny_base: Path) -> None:
    first = make(tiny_base)
    torch.rand(100)
    again = make(tiny_base, {"solver": MIXED["solver"], "planner": MIXED["planner"]})
    other = make(tiny_base, seed=1)
    for agent in ("planner", "solver"):
        assert bits(first.tensors(agent)) == bits(again.tensors(agent))
        assert first.version(agent) == again.version(agent)
        assert first.version(agent).content_hash != other.version(agent).content_hash
    state = torch.get_rng_state()
    make(tiny_base)
    assert torch.equal(torch.get_rng_state(), state), "building a bank draws nothing from the global generator"


@pytest.mark.parametrize("agent", ["planner", "solver", "checker"])
def test_plain_peft_loads_an_exported_version_with_the_same_logits(tiny_base: Path, tmp_path: Path, agent: str) -> None:
    bank = make(tiny_base)
    fill(bank, agent, scale=0.1)
    version = bank.commit(agent)
    folder = write_version(tmp_path, version, bank.tensors(agent), bank.config(agent))
    plain = AutoModelForCausalLM.from_pretrained(tiny_base, attn_implementation="sdpa").eval()
    loaded = PeftModel.from_pretrained(plain, folder).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, logits(bank, agent))


def test_the_exported_config_holds_nothing_of_this_machine(tiny_base: Path) -> None:
    config = make(tiny_base).config("solver")
    assert config["base_model_name_or_path"] == "tiny"
    assert str(tiny_base) not in str(config)


def test_the_content_hash_changes_with_every_bit_and_with_the_scale(tiny_base: Path) -> None:
    bank = make(tiny_base)
    seen = {bank.version("solver").content_hash}
    for parameter in bank.parameters("solver").values():
        parameter.data.view(-1).view(torch.int32)[3] ^= 1  # the last bit of one number
        seen.add(bank.commit("solver").content_hash)
    assert len(seen) == 1 + len(bank.parameters("solver"))
    assert bank.version("solver").number == len(bank.parameters("solver"))
    hashes = {
        make(tiny_base, {"solver": s}).version("solver").content_hash
        for s in (lora(4, 8.0), lora(4, 9.0), lora(4, 8.0, rslora=True))
    }
    assert len(hashes) == 3, "the same weights under another scale are another policy"


def test_load_puts_a_stored_version_in_place(tiny_base: Path) -> None:
    bank = make(tiny_base)
    fill(bank, "solver")
    version, stored = bank.commit("solver"), bank.snapshot("solver")
    fill(bank, "solver", seed=9)
    bank.commit("solver")
    bank.load(version, stored)
    assert bank.version("solver") == version and bits(bank.tensors("solver")) == bits(stored)
    assert bank.commit("solver").content_hash == version.content_hash


def test_names_that_clash_with_attributes_of_torch_modules_work(tiny_base: Path) -> None:
    names = ["train", "items", "update", "forward", "default", "weight", "lora_a", "base_layer", "a", "a-b", "a_b", "agent_a"]
    bank = make(tiny_base, {name: lora(2, 2.0, ["q_proj"]) for name in names})
    for index, name in enumerate(names):
        assert len(bank.parameters(name)) == 4, name
        fill(bank, name, seed=index, scale=0.3)
    outputs = [logits(bank, name) for name in names]
    for i, name in enumerate(names):
        alone = make(tiny_base, {"x": lora(2, 2.0, ["q_proj"])})
        alone.restore("x", bank.snapshot(name))
        assert torch.equal(logits(alone, "x"), outputs[i]), name
    with torch.no_grad():
        rows = bank.model(input_ids=IDS[:1].repeat(len(names), 1), adapter_names=bank.mixed_names(names)).logits
    for i, name in enumerate(names):
        assert torch.allclose(rows[i], outputs[i][0], atol=1e-4), name
