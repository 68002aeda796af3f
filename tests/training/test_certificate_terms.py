"""The certificate's terms against a brute-force recomputation."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from teamtr_lora.algorithm.variants.reuse import HoldOut
from teamtr_lora.recipe import TrustRegionSection
from teamtr_lora.runs.metrics import CertificateTerms
from teamtr_lora.team import agent_sequences
from teamtr_lora.training.batches import judging_weights
from teamtr_lora.training.certificate_terms import certificate_terms
from teamtr_lora.training.gate import Judging, gate_pass, read_candidate
from teamtr_lora.training.scoring import keep_current
from teamtr_lora.training.update import AgentUpdater
from teamtr_lora.training.window import Material, PlayedEpisodes


def logp(playable: Any, message: Any, temperature: float) -> float:
    ids = torch.tensor([message.prompt_ids + message.token_ids])
    with torch.no_grad():
        logits = playable.bank.model(input_ids=ids, use_cache=False).logits[0, len(message.prompt_ids) - 1 : -1].double()
    return float(torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(message.token_ids)[:, None]).sum())


def test_terms_are_those_of_the_held_out_episodes(make_team: Any, config: Any, accelerator: Any, twins: Any) -> None:
    episodes = twins
    playable, settings = make_team(), config()
    updater = AgentUpdater(playable, settings)
    before = playable.bank.snapshot("left")
    outcome = updater.update("left", Material(newest=PlayedEpisodes(episodes)), 0)
    assert outcome.accepted and outcome.accepted_reading is not None and outcome.judging is not None
    advantages = outcome.advantages.clipped_E.tolist()
    informative = {e.group for e, a in zip(episodes, advantages, strict=True) if a}
    groups = HoldOut(settings.trust_region).divide(episodes, informative, False, 0).judge
    held = [e for e in episodes if e.group in groups]
    after = playable.bank.snapshot("left")
    playable.bank.activate("left")
    temperature, totals = settings.rollout.temperature, {"discounted": [], "raw": [], "clipped": []}
    for episode in held:
        mates = [e for e in held if e.group == episode.group and e is not episode]
        ratio = clipped = 0.0
        for message in (m for m in episode.messages if m.agent == "left"):
            new = logp(playable, message, temperature)
            playable.bank.restore("left", before)
            weight = math.exp(new - logp(playable, message, temperature))
            ratio, clipped = ratio + weight - 1, clipped + np.clip(weight, 0.8, 1.2) - 1
            playable.bank.restore("left", after)
        for name, weight, value in (
            ("discounted", ratio, lambda e: e.discounted_return(updater.discount)),
            ("clipped", clipped, lambda e: e.discounted_return(updater.discount)),
            ("raw", ratio, lambda e: e.reward),
        ):
            totals[name].append(weight * (value(episode) - np.mean([value(e) for e in mates])))
    terms = certificate_terms(outcome.accepted_reading, outcome.judging, episodes, config=settings, gamma=updater.discount)
    near = {"rel": 1e-5, "abs": 1e-6}  # of float32 passes in other batches
    assert terms.surrogate == pytest.approx(np.mean(totals["discounted"]), **near)
    assert terms.surrogate_undiscounted == pytest.approx(np.mean(totals["raw"]), **near)
    assert settings.training.clip_ratio == 0.2 and terms.surrogate_clipped == pytest.approx(np.mean(totals["clipped"]), **near)
    by_group = [[t for e, t in zip(held, totals["clipped"], strict=True) if e.group == g] for g in sorted(groups)]
    assert terms.surrogate_clipped_groups == pytest.approx([np.mean(mine) for mine in by_group], **near)
    assert terms.groups == len(groups) and len(terms.turn_kl) == 1
    accepted = outcome.readings[outcome.step.accepted.alpha]  # type: ignore[union-attr]
    assert terms.turn_kl[0] == pytest.approx(accepted.message_sum_kl, rel=1e-6)
    assert terms.kl == pytest.approx(accepted.discounted_kl, rel=1e-9)


def test_the_kl_of_an_agent_that_is_silent_in_some_episodes_counts_them(make_team: Any, config: Any, twins: Any) -> None:
    """def:kltok is a mean over all episodes, as L is; the gate's reading is one over those with a message of the agent."""
    settings = config()
    whole = _terms_of(make_team(), settings, twins)
    for episode in twins[1::2]:
        episode.messages = [m for m in episode.messages if m.agent != "left"]
    half = _terms_of(make_team(), settings, twins)
    assert whole.kl == pytest.approx((1 - 0.5) * whole.turn_kl[0])  # turn 0 of two, gamma = 1/2
    assert half.kl == pytest.approx((1 - 0.5) * half.turn_kl[0]) and 0 < half.kl < whole.kl
    for episode in twins:
        episode.messages = [m for m in episode.messages if m.agent == "right"]
    second = _terms_of(make_team(), settings, twins, agent="right")
    assert second.kl == pytest.approx((1 - 0.5) * 0.5 * second.turn_kl[0]) and second.kl > 0, "at turn 1"


@pytest.mark.parametrize(("mixed", "items"), [(2, 16), (5, 16), (3, 8), (8, 8), (1, 40)])
def test_held_out_episodes_count_as_many_as_they_stand_for(mixed: int, items: int) -> None:
    """A value that is 1 where returns differ and 0 elsewhere has the mean of all items, whichever were held out."""
    episodes: Any = [SimpleNamespace(item_id=str(g), group=g) for g in range(items) for _ in range(4)]
    division = HoldOut(TrustRegionSection(holdout=0.25)).divide(episodes, set(range(mixed)), False, 0)
    held = [i for i, e in enumerate(episodes) if e.group in division.judge]
    weight = judging_weights(episodes, episodes, set(division.judge), set(range(mixed)))[held]
    differs = np.array([episodes[i].group < mixed for i in held])
    assert not set(division.judge) & set(division.fit) and set(division.judge) | set(division.fit) == set(range(items))
    assert differs.any() == (mixed > 1), "both kinds judge, unless the gradient needs the only one with differences"
    assert (~differs).any() == (mixed < items)
    if mixed > 1:
        assert (weight * differs).mean() == pytest.approx(mixed / items)
        assert (weight * ~differs).mean() == pytest.approx(1 - mixed / items)
    assert weight.min() > 0


def test_terms_weigh_what_was_held_out(make_team: Any, config: Any, twins: Any) -> None:
    """Two groups of eight are held out, one of the single one with differences: it stands for an eighth, and is a half."""
    plain = _terms_of(make_team(), config(), twins, {0, 1}, set(range(8)))
    weighted = _terms_of(make_team(), config(), twins, {0, 1}, {0})
    first, second = plain.surrogate_clipped_groups
    assert first and second and (plain.largest_weight, weighted.largest_weight) == (1, 7 / 4)
    assert weighted.surrogate_clipped_groups == pytest.approx([first / 4, second * 7 / 4])
    assert weighted.surrogate_clipped == pytest.approx((first + 7 * second) / 8)

    zero, one = (_terms_of(make_team(), config(), twins, {group}, set(range(8))) for group in (0, 1))
    for name in ("kl", "surrogate", "surrogate_undiscounted"):
        of_zero, of_one = getattr(zero, name), getattr(one, name)
        assert of_zero != pytest.approx(of_one)
        assert getattr(plain, name) == pytest.approx((of_zero + of_one) / 2), name
        assert getattr(weighted, name) == pytest.approx((of_zero + 7 * of_one) / 8), name
    assert weighted.turn_kl == pytest.approx([2 * weighted.kl])  # turn 0 of two, gamma = 1/2


def test_groups_that_earn_the_same_lend_no_confidence(make_team: Any, config: Any, twins: Any) -> None:
    """Their part of L is 0 whatever the step: it lowers the mean and its error alike, and is no third observation."""
    for episode in twins:
        if episode.group == 2:
            episode.rewards = [0.0] * len(episode.rewards)
    two, three = (_terms_of(make_team(), config(), twins, groups, set(range(8))) for groups in ({0, 1}, {0, 1, 2}))
    assert two.surrogate_standard_error and three.surrogate == pytest.approx(2 / 3 * two.surrogate)
    assert three.surrogate_standard_error == pytest.approx(2 / 3 * two.surrogate_standard_error)


def _terms_of(
    playable: Any, settings: Any, episodes: Any, groups: set[int] | None = None, informative: set[int] | None = None,
    agent: str = "left",
) -> CertificateTerms:  # fmt: skip
    bank = playable.bank
    scorer = AgentUpdater(playable, settings).scorer
    groups = groups or {e.group for e in episodes}
    held = [sequence for sequence in agent_sequences(episodes, agent) if sequence.episode.group in groups]
    batch = scorer.batch(held)
    bank.activate(agent)
    with gate_pass(scorer):
        current = keep_current(scorer, batch)
        generator = torch.Generator().manual_seed(0)
        bank.restore(agent, {n: t + 0.05 * torch.randn(t.shape, generator=generator) for n, t in bank.snapshot(agent).items()})
        reading = read_candidate(scorer, batch, current, settings, 0.5)
    weight_E = judging_weights(episodes, episodes, groups, informative or groups)
    read_E = np.array([episode.group in groups for episode in episodes])
    judging = Judging(batch, groups, groups, weight_E, read_E)
    return certificate_terms(reading, judging, episodes, config=settings, gamma=0.5)
