"""The measured floor of each pass, and what is refused because of it."""

import logging
from contextlib import contextmanager

import pytest
import torch

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import TrustRegionSection
from teamtr_lora.team import agent_sequences
from teamtr_lora.training import floor
from teamtr_lora.training.floor import check_floors, measure_floors
from teamtr_lora.training.gate import gate_pass
from teamtr_lora.training.scoring import Scorer, keep_current


def floors_of(playable, episodes, agent: str = "left", reduction: str = "message_sum") -> dict[str, float]:
    scorer = Scorer(playable.base, playable.bank, temperature=1.0, head_chunk_tokens=64)
    return measure_floors(scorer, playable.bank, agent, episodes, region=TrustRegionSection(reduction=reduction))


def test_fp32_resolves_far_below_any_usable_delta(make_team, episodes, state_of) -> None:
    playable = make_team()
    before = state_of(playable.bank.model)
    floors = floors_of(playable, episodes)
    assert set(floors) == {"training", "gate"}
    assert 0 <= floors["gate"] < 1e-9 and 0 <= floors["training"] < 1e-9
    assert state_of(playable.bank.model) == before, "the perturbation is taken back bit for bit"


def test_a_bf16_training_pass_is_far_noisier_than_its_gate(make_team, episodes, move, state_of) -> None:
    playable = make_team(precision="bf16")
    move(playable, "left", 0.02)
    before = state_of(playable.bank.model)
    floors = floors_of(playable, episodes[:6])
    assert floors["gate"] < 1e-9
    assert floors["training"] > 100 * floors["gate"]
    assert state_of(playable.bank.model) == before
    assert playable.base.model.get_output_embeddings().weight.dtype == torch.bfloat16


def test_the_floor_is_the_noise_that_a_small_step_really_meets(make_team, episodes, move) -> None:
    """In bf16 a fresh adapter moved by a true KL near 1e-6 reads near 1e-4: a floor far below that would promise too much."""
    playable = make_team(precision="bf16")
    how, chosen = {"temperature": 1.0, "head_chunk_tokens": 64, "tokens_per_microbatch": 2000}, episodes[:6]
    scorer = Scorer(playable.base, playable.bank, **how)
    batch = scorer.batch(agent_sequences(chosen, "left"))

    def read() -> float:
        before = playable.bank.snapshot("left")
        current = keep_current(scorer, batch)
        move(playable, "left", 1e-4)
        with torch.no_grad():
            parts = zip(batch.microbatches, current.states, strict=True)
            total = sum(float(scorer.score_and_keep(part, kept)[0].kl_N.sum()) for part, kept in parts)
        playable.bank.restore("left", before)
        return total / len(chosen)

    playable.bank.activate("left")
    with gate_pass(scorer):
        true_kl = read()
    noisy = read()
    assert true_kl < 0.1 * noisy, "the example should be dominated by bf16's rounding"
    assert floors_of(playable, chosen)["training"] > 0.1 * noisy


def test_a_gate_of_fewer_digits_has_their_noise_for_a_floor(make_team, episodes, move, monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 by hand: hidden states with ten bits of mantissa. The smallest perturbation is then rounded away, and reads zero."""
    playable = make_team(precision="bf16")
    move(playable, "left", 0.02)
    modes: list[bool] = []
    strict, hidden = Scorer.strict, Scorer.hidden

    @contextmanager
    def noted(self, *, tf32: bool):
        with strict(self, tf32=False):
            modes.append(tf32)
            yield
            modes.pop()

    def rounded(self, batch):
        exact = hidden(self, batch)
        return (exact.float().view(torch.int32) & ~0x1FFF).view(torch.float32) if modes and modes[-1] else exact

    monkeypatch.setattr(Scorer, "strict", noted)
    monkeypatch.setattr(Scorer, "hidden", rounded)
    floors = {}
    for tf32 in (False, True):
        scorer = Scorer(playable.base, playable.bank, temperature=1.0, head_chunk_tokens=64)
        scorer.has_tf32 = True
        region = TrustRegionSection(gate_precision="tf32" if tf32 else "fp32")
        floors[tf32] = measure_floors(scorer, playable.bank, "left", episodes[:6], region=region)
        assert scorer.tf32 == tf32
    coarse = floors[True]["gate"]
    assert floors[False]["gate"] < 1e-9 < 1e-8 < coarse < floors[True]["training"]
    for share, kept in ((4.9, False), (5.1, True)):  # auto: TF32 where the radius is five times what it can resolve
        scorer = Scorer(playable.base, playable.bank, temperature=1.0, head_chunk_tokens=64)
        scorer.has_tf32 = True
        region = TrustRegionSection(gate_precision="auto", delta=share * coarse)
        assert measure_floors(scorer, playable.bank, "left", [], region=region) == {} and not scorer.tf32, "strict until tried"
        floor = measure_floors(scorer, playable.bank, "left", episodes[:6], region=region)["gate"]
        assert scorer.tf32 == kept and floor == pytest.approx(coarse if kept else floors[False]["gate"])


@pytest.mark.parametrize("reduction", ["message_sum", "token_mean"])
def test_training_passes_that_are_too_noisy_add_up_in_float32(make_team, episodes, monkeypatch, reduction: str) -> None:
    playable, asked = make_team(precision="bf16"), []
    region = TrustRegionSection(reduction=reduction)

    def chosen() -> bool:
        scorer = Scorer(playable.base, playable.bank, temperature=1.0, head_chunk_tokens=64)
        measure_floors(scorer, playable.bank, "left", episodes[:6], region=region)
        return scorer.float32_sum

    assert not chosen(), "no base can on a CPU"
    monkeypatch.setattr(Scorer, "takes_float32_sum", lambda *_: True)
    training = playable.bank.training
    monkeypatch.setattr(playable.bank, "training", lambda *a, **how: asked.append(how["float32_sum"]) or training(*a, **how))
    tokens = sum(len(e.messages[0].token_ids) for e in episodes[:6]) / 6
    noise = floors_of(playable, episodes[:6], reduction=reduction)["training"] / (tokens if reduction == "message_sum" else 1)
    for limit, float32_sum in ((1.5 * noise, False), (0.7 * noise, True)):
        asked.clear()
        monkeypatch.setattr(floor, "TRAINING_FLOOR", limit)
        assert chosen() == float32_sum and asked == [False, True][: 1 + float32_sum]


def test_the_floor_is_of_the_recipes_reduction(make_team, episodes, move) -> None:
    playable = make_team()
    move(playable, "left", 0.5)  # a loud adapter, so that rounding shows
    total, mean = floors_of(playable, episodes)["gate"], floors_of(playable, episodes, reduction="token_mean")["gate"]
    length = sum(len(e.messages[0].token_ids) for e in episodes) / len(episodes)
    assert 0 < mean < total < 3 * length * mean


def test_a_delta_the_gate_cannot_resolve_is_refused_with_both_numbers() -> None:
    with pytest.raises(UserError) as caught:
        check_floors({"training": 0.0, "gate": 0.0031}, 0.0125)
    line = str(caught.value)
    assert "0.0125" in line and "0.0031" in line and "0.015" in line and "gate_precision" not in line and "\n" not in line
    with pytest.raises(UserError, match="or trust_region.gate_precision=fp32"):
        check_floors({"training": 0.0, "gate": 0.0031}, 0.0125, tf32=True)
    check_floors({"training": 0.0, "gate": 0.0031}, 5 * 0.0031)
    check_floors({}, 1e-6)


def test_a_noisy_training_pass_is_a_warning_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_floors({"training": 0.2, "gate": 1e-9}, 0.01)
    assert "0.2" in caplog.text and "0.01" in caplog.text
    caplog.clear()
    check_floors({"training": 0.005, "gate": 1e-9}, 0.01)
    assert not caplog.text


def test_an_agent_that_never_spoke_has_no_floor(make_team, episodes) -> None:
    for episode in episodes:
        episode.messages = [m for m in episode.messages if m.agent == "right"]
    assert floors_of(make_team(), episodes) == {}
