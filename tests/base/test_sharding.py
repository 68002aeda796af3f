"""A base that two processes split, by gloo, against the same base in one."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from teamtr_lora.algorithm.token_kl import score_tokens
from teamtr_lora.algorithm.variants.chosen import Variants
from teamtr_lora.base import bank as bank_module
from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase, base_facts, load_base
from teamtr_lora.base.precision import head_weight, strict_fp32
from teamtr_lora.base.sharding import split_bytes, splits
from teamtr_lora.base.source import resolve
from teamtr_lora.common.ranks import Ranks, _Group
from teamtr_lora.recipe import LoraSection, TeamTRConfig
from teamtr_lora.team import Episode, Message, agent_sequences
from teamtr_lora.training.batches import message_batch
from teamtr_lora.training.gate import gate_pass, read_candidate
from teamtr_lora.training.optimize import Learner, Minibatch, accumulate
from teamtr_lora.training.scoring import Scorer, keep_current

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


def compare(rank: int, precision: str, *, fused: bool = False) -> None:
    """`fused`: by the layers that a GPU trains with in half precision, which compute in any."""
    bank_module.can_fuse = lambda *_: fused
    whole = load_base("nano", device="cpu", precision=precision)
    stored = {name: parameter.clone() for name, parameter in whole.model.named_parameters()}
    expected = passes(whole, adapted(whole))
    base = load_base("nano", device="cpu", precision=precision, split=True)
    bank = adapted(base)
    check_stored(base, stored, rank)
    for checkpointing in (False, True) if precision == "fp32" else (False,):
        found = passes(base, bank, checkpointing=checkpointing)
        for name, value in expected.items():
            assert torch.allclose(found[name].float(), value.float(), rtol=1e-6, atol=1e-6), (precision, name, checkpointing)
    check_stored(base, stored, rank)


def dealt(base: FrozenBase, bank: AdapterBank, ranks: Ranks, episodes: int) -> list[Tensor]:
    """A gradient and a reading of the gate over micro-batches that are dealt to `ranks`, one an episode."""
    played = [
        Episode(
            "x", n, "", 0, messages=[Message("a", 0, [3, 4, 5], [7 + n, 8, 9][: 1 + n], [0.0] * min(3, 1 + n), "v", "stop", "")]
        )
        for n in range(episodes)
    ]
    batch = message_batch(agent_sequences(played, "a"), [1.0, -2.0, 3.0][:episodes], tokens_per_microbatch=1, device=base.device)
    assert len(batch.microbatches) == episodes
    scorer, config = Scorer(base, bank, temperature=1.0, head_chunk_tokens=16, ranks=ranks), TeamTRConfig()
    before, minibatch, found = bank.snapshot("a"), Minibatch(batch), list[Tensor]()
    with scorer.training("a") as parameters:
        learner = Learner(
            scorer=scorer, optimizer=None, parameters=parameters, scaler=torch.amp.GradScaler("cpu", enabled=False),
            config=config, region=Variants.of(config).region, start_again=lambda: None,
        )  # fmt: skip
        for _ in range(2):
            seen = accumulate(learner, minibatch, 0.5)
            found += [torch.tensor([seen.kl, seen.gain]), *(p.grad.clone() for p in parameters if p.grad is not None)]
            with torch.no_grad():
                for parameter in parameters:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    with gate_pass(scorer):
        after = bank.snapshot("a")
        bank.restore("a", before)
        current = keep_current(scorer, batch)
        bank.restore("a", after)
        found.append(read_candidate(scorer, batch, current, config, 0.5).kl_M)
    bank.restore("a", before)
    return found


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = _Group(torch.distributed.FileStore(str(folder / "store"), 2), rank, 2)
    ranks.make_global()
    for precision in ("fp32", "bf16"):  # fp16 is below, bit for bit
        compare(rank, precision)
    compare(rank, "fp32", fused=True)
    bank_module.can_fuse = lambda *_: False
    whole, base = (load_base("nano", device="cpu", precision="fp16", split=split) for split in (False, True))
    banks = adapted(whole), adapted(base)
    for episodes in (3, 1):  # two and one, and one and none
        alone, together = dealt(whole, banks[0], Ranks(), episodes), dealt(base, banks[1], ranks, episodes)
        for place, (one, two) in enumerate(zip(alone, together, strict=True)):
            assert torch.equal(one, two), (episodes, place, one, two)
    torch.distributed.destroy_process_group()


def test_a_split_base_computes_the_same_and_keeps_its_precision(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")  # whose processes start with everything imported
    context.set_forkserver_preload(["teamtr_lora.training.trainer", "peft"])
    ranks = [context.Process(target=work, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(400)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0, 0]


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
