"""A base that two processes split, by gloo, against the same base in one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from teamtr_lora.algorithm.token_kl import score_tokens
from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase, base_facts, load_base
from teamtr_lora.base.precision import head_weight, strict_fp32
from teamtr_lora.base.sharding import split_bytes, splits
from teamtr_lora.base.source import resolve
from teamtr_lora.recipe import LoraSection

IDS_B_T = torch.arange(10)[None] * 7 + 3


def adapted(base: FrozenBase) -> AdapterBank:
    bank = AdapterBank(base.model, {"a": LoraSection(rank=4)}, base_name="nano", seed=0)
    generator = torch.Generator().manual_seed(1)
    bank.restore("a", {name: torch.randn(t.shape, generator=generator) * 0.05 for name, t in bank.snapshot("a").items()})
    bank.activate("a")
    return bank


def passes(base: FrozenBase, bank: AdapterBank, *, checkpointing: bool = False) -> dict[str, Tensor]:
    """What an update computes: a gradient of surrogate and KL, the gate's KL in strict float32, and logits as a sampler would."""
    head, target_N = head_weight(base.model).detach(), IDS_B_T.flatten()

    def hidden() -> Tensor:
        return bank.decoder(input_ids=IDS_B_T, use_cache=False).last_hidden_state.flatten(0, 1)

    with torch.no_grad(), strict_fp32(bank.model):
        before_ND = hidden()
    start = bank.snapshot("a")
    bank.restore("a", {name: tensor * 1.1 for name, tensor in start.items()})
    if checkpointing:
        bank.enable_gradient_checkpointing()
    with bank.training("a") as parameters:
        scores = score_tokens(hidden(), head, target_N, temperature=1.0, chunk_tokens=16, current_ND=before_ND)
        assert scores.kl_N is not None
        (scores.kl_N.mean() - scores.logp_N.mean()).backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    with torch.no_grad(), strict_fp32(bank.model):
        strict = score_tokens(hidden(), head.float(), target_N, temperature=1.0, chunk_tokens=16, current_ND=before_ND).kl_N
    with torch.no_grad():
        logits = bank.model(input_ids=IDS_B_T).logits
    bank.restore("a", start)
    assert strict is not None and float(strict.min()) > 0 and float(gradient.abs().max()) > 0
    return {"kl": scores.kl_N.detach(), "gradient": gradient, "strict kl": strict, "logits": logits}


def check_stored(base: FrozenBase, stored: dict[str, Tensor], rank: int) -> None:
    """Each process has its half of every layer, as it is stored, and all of the rest."""
    for name, parameter in base.model.named_parameters():
        if "lora_" in name:
            assert type(parameter.data) is Tensor and parameter.dtype == torch.float32
            continue
        name = name.replace(".base_layer", "")
        assert parameter.dtype == base.dtype == stored[name].dtype, name
        if ".layers." in name:
            half = stored[name].chunk(2)[rank]
            assert torch.equal(parameter.to_local(), half), name  # type: ignore[operator]
        else:
            assert torch.equal(parameter, stored[name]), name


def compare(rank: int, precision: str) -> None:
    whole = load_base("nano", device="cpu", precision=precision)
    stored = {name: parameter.clone() for name, parameter in whole.model.named_parameters()}
    expected = passes(whole, adapted(whole))
    base = load_base("nano", device="cpu", precision=precision, split=True)
    bank = adapted(base)
    check_stored(base, stored, rank)
    for checkpointing in (False, True):
        found = passes(base, bank, checkpointing=checkpointing)
        for name, value in expected.items():
            assert torch.allclose(found[name].float(), value.float(), rtol=1e-6, atol=1e-6), (precision, name, checkpointing)
    check_stored(base, stored, rank)


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for precision in ("fp32", "bf16", "fp16"):
        compare(rank, precision)
    torch.distributed.destroy_process_group()


def test_a_split_base_computes_the_same_and_keeps_its_precision(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for process in ranks:
            _, said = process.communicate(timeout=180)
            assert process.returncode == 0, said[-3000:]
    finally:
        for process in ranks:
            process.kill()


def test_auto_splits_what_does_not_fit_one_gpu() -> None:
    nano, gib = base_facts(resolve("nano", None)), 2**30
    large = replace(nano, hidden_size=5120, layers=64, intermediate_size=27648, vocab_size=151936, parameters=32_760_000_000)
    room = {"value": 2, "engine_bytes": 0, "device_bytes": 80 * gib}
    assert not splits("auto", large, over=8, **room), "61 GiB and an update fit 80"
    assert splits("auto", large, over=8, **room | {"engine_bytes": 24 * gib}) and not splits("auto", nano, over=8, **room)
    assert splits("auto", large, over=2, **room | {"device_bytes": 64 * gib}), "the update has to fit as well"
    assert not splits("auto", large, over=1, **room | {"device_bytes": 40 * gib}), "there is nobody to share it with"
    assert not splits("never", large, over=8, **room | {"device_bytes": 40 * gib})
    assert splits("always", nano, over=2, **room | {"device_bytes": None}) and not splits("always", nano, over=1, **room)


def test_bytes_of_a_part() -> None:
    """By hand: what one process of two has of the embedded base in fp32, with all layers but two gathered none."""
    facts = base_facts(resolve("nano", None))
    model = load_base("nano", device="cpu", precision="fp32").model
    linear = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.dim() == 2)
    whole = sum(p.numel() for p in model.parameters()) - linear
    assert split_bytes(facts, 4, 2) == 4 * (whole + linear // 2 + 2 * linear // facts.layers)


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]))
