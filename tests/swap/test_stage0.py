"""Stage-0's KL against a plain forward pass, and what it learns from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from teamtr_lora.recipe import LoraSection
from teamtr_lora.rollout.playable import PlayableTeam, load_versions, open_team
from teamtr_lora.runs.stored_run import read_run
from teamtr_lora.swap.probe_contexts import Probe, context_strings, play_probe, probe_from, probe_record, replayed
from teamtr_lora.swap.session import scorer_for
from teamtr_lora.swap.stage0 import (
    CONTEXT_WEIGHT,
    Half,
    Stage0,
    Teacher,
    _weights,
    in_chunks,
    probe_batch,
    read_half,
    teacher_states,
)


@pytest.fixture(scope="module")
def played(trained: Path) -> tuple[PlayableTeam, Probe]:
    stored = read_run(trained)
    recipe, versions = stored.recipe, stored.versions
    extra = {"candidate": LoraSection(rank=3, alpha=6.0)}
    playable = open_team(recipe.base, recipe.team, recipe.rollout, seed=0, folder=recipe.folder, extra=extra)
    load_versions(playable, versions, trained / "adapters")
    return playable, play_probe(playable, recipe.task.build(recipe.folder), recipe, ["left"], 10)


def test_held_out_kl_is_that_of_whole_distributions(trained: Path, played: tuple[PlayableTeam, Probe]) -> None:
    playable, probe = played
    recipe = read_run(trained).recipe
    scorer = scorer_for(playable, recipe)
    scorer.tokens_per_microbatch = 200  # of several micro-batches
    _, held = probe.halves("left", 10, 0)
    playable.bank.activate("left")
    batch = probe_batch(scorer, held)
    half = Half([batch], [Teacher(teacher_states(scorer, batch))])

    def logp(adapter: str, ids: list[int], start: int) -> torch.Tensor:
        playable.bank.activate(adapter)
        with torch.no_grad():
            logits = playable.bank.model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1].double()
        return torch.log_softmax(logits / recipe.rollout.temperature, -1)

    expected = []
    for context in held:
        (span,) = context.spans
        old, new = (logp(adapter, context.ids, span.start) for adapter in ("left", "candidate"))
        expected.append(float((old.exp() * (old - new)).sum()))
    playable.bank.activate("candidate")
    reading = read_half(scorer, half, recipe.trust_region)
    assert reading.mean == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    assert reading.standard_error is not None and reading.bound is not None and reading.bound > reading.mean
    playable.bank.activate("left")
    assert read_half(scorer, half, recipe.trust_region).mean == pytest.approx(0, abs=1e-10)


def test_the_loss_scale_of_half_precision_goes_on_where_it_was(trained: Path, played: tuple[PlayableTeam, Probe]) -> None:
    playable, probe = played
    recipe = read_run(trained).recipe
    scorer = scorer_for(playable, recipe)
    scorer.tokens_per_microbatch = 200
    playable.bank.activate("left")
    halves = []
    for contexts in probe.halves("left", 10, 0):
        batch = probe_batch(scorer, contexts)
        halves.append(Half([batch], [Teacher(teacher_states(scorer, batch))]))
    start = playable.bank.snapshot("candidate")

    def stage0() -> Stage0:
        region, swap = recipe.trust_region, recipe.swap
        return Stage0(scorer, playable.bank, "candidate", *halves, region, swap, delta=1e-9, seed="x", half_precision=True)

    kept: list[Any] = []

    def killed(*parts: Any) -> None:
        kept.extend(parts)
        raise SystemExit

    first = stage0()
    with pytest.raises(SystemExit):
        first.run(first.start(), killed)
    assert kept[2]["scaler"]["_growth_tracker"] == kept[0].steps > 0
    again = stage0()
    again.resume(*kept)
    assert again._scaler.state_dict() == kept[2]["scaler"]
    playable.bank.restore("candidate", start)


def test_a_mean_inside_is_not_enough_to_begin_with(trained: Path, played: tuple[PlayableTeam, Probe]) -> None:
    """Nothing to learn is a bound inside the radius, before the first step as after it."""
    playable, probe = played
    recipe = read_run(trained).recipe
    scorer = scorer_for(playable, recipe)
    scorer.tokens_per_microbatch = 200
    playable.bank.activate("left")
    batches = [probe_batch(scorer, contexts) for contexts in probe.halves("left", 10, 0)]
    halves = [Half([batch], [Teacher(teacher_states(scorer, batch))]) for batch in batches]

    def begun(delta: float) -> tuple[bool, bool]:
        work = Stage0(scorer, playable.bank, "candidate", *halves, recipe.trust_region, recipe.swap, delta=delta, seed="x")
        state = work.start()
        return state.reached, state.done

    playable.bank.activate("candidate")
    reading = read_half(scorer, halves[1], recipe.trust_region)
    assert reading.bound is not None and reading.mean < reading.bound
    assert begun((reading.mean + reading.bound) / 2) == (True, False)
    assert begun(1.01 * reading.bound) == (True, True) and begun(0.9 * reading.mean) == (False, False)


def test_halves_share_no_item_and_chunks_lose_no_context(trained: Path, played: tuple[PlayableTeam, Probe]) -> None:
    playable, probe = played
    fit, held = probe.halves("left", 10, 0)
    assert len(fit) + len(held) == 10
    assert not {c.episode.item_id for c in fit} & {c.episode.item_id for c in held}
    assert sorted(id(c) for chunk in in_chunks(fit, 2) for c in chunk) == sorted(map(id, fit))
    batch = probe_batch(scorer_for(playable, read_run(trained).recipe), fit, with_context=True)
    weights = _weights(batch, "message_sum")
    own = torch.tensor([m.turn >= 0 for m in batch.messages])
    tokens = torch.tensor([float(len(m.token_ids)) for m in batch.messages])
    assert weights[own].sum() == pytest.approx(1.0), "a mean over messages"
    inside, said = (float((weights * tokens)[side].sum()) for side in (~own, own))
    assert inside == pytest.approx(CONTEXT_WEIGHT * said, rel=0.3), "all the contexts' tokens weigh as much as the messages'"
    for message, context in zip([m for m in batch.messages if m.turn < 0], fit, strict=True):
        start = context.spans[0].start
        assert message.token_ids == context.ids[start - len(message.token_ids) : start]


def test_a_probe_is_the_same_from_disk_and_played_again_by_the_same_protocol(played: tuple[PlayableTeam, Probe]) -> None:
    playable, probe = played
    again = probe_from(probe_record(probe))
    assert [(m.prompt_ids, m.token_ids) for e in again.episodes for m in e.messages] == [
        (m.prompt_ids, m.token_ids) for e in probe.episodes for m in e.messages
    ]
    rendered = replayed(again.episodes, playable.team.protocol)
    assert [m.prompt_ids for e in rendered for m in e.messages] == [m.prompt_ids for e in probe.episodes for m in e.messages]
    strings = context_strings(probe, playable.base.tokenizer, 1000)
    assert len(strings) >= 1000 and len(set(strings)) == len(strings)
