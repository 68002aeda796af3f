"""The measured floor of each pass, and what is refused because of it."""

import logging

import pytest
import torch

from teamtr_lora.errors import UserError
from teamtr_lora.training.floor import check_floors, measure_floors
from teamtr_lora.training.scoring import Scorer


def floors_of(playable, episodes, agent: str = "left", reduction: str = "message_sum") -> dict[str, float]:
    scorer = Scorer(playable.base, playable.bank, temperature=1.0, head_chunk_tokens=64)
    return measure_floors(scorer, playable.bank, agent, episodes, tokens_per_microbatch=2000, reduction=reduction)


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
    floors = floors_of(playable, episodes[:3])
    assert floors["gate"] < 1e-9
    assert floors["training"] > 100 * floors["gate"] and floors["training"] > 1e-6
    assert state_of(playable.bank.model) == before
    assert playable.base.model.get_output_embeddings().weight.dtype == torch.bfloat16


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
    assert "0.0125" in line and "0.0031" in line and "0.015" in line and "gate_precision" in line and "\n" not in line
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
