"""From an update's outcome to its metrics row, and to words."""

from __future__ import annotations

import math
import time
from collections import defaultdict

from teamtr_lora.algorithm.advantage import GroupAdvantages
from teamtr_lora.evaluation.statistics import standard_error
from teamtr_lora.runs.metrics import KLReading, UpdateRow
from teamtr_lora.team import Episode
from teamtr_lora.training.gate import CandidateReading
from teamtr_lora.training.stage_rollouts import Rollout
from teamtr_lora.training.update import UpdateOutcome


def update_row(outcome: UpdateOutcome, rollout: Rollout, *, stage: int, update: int) -> UpdateRow:
    """The row of a stage's update number `update`, counted from 1, without what is measured about it later."""
    accepted, reading, episodes = outcome.step.accepted, outcome.shown, rollout.episodes
    fitted = outcome.step.shown.fitted_bound if outcome.step.shown else None
    bounds = (reading.kl["exact"].bound if reading else None, fitted)
    tokens = sum(e.tokens for e in episodes)
    return UpdateRow(
        stage=stage,
        update=update,
        agent=outcome.version.agent,
        decision=outcome.decision,
        reason=decision_reason(outcome),
        version=outcome.version.name,
        content_hash=outcome.version.content_hash,
        team_versions=rollout.versions,
        delta=outcome.delta,
        alpha=accepted.alpha if accepted else None,
        alphas_tried=[r.alpha for r in outcome.step.readings],
        out_of_region=accepted is not None and not all(bound <= outcome.delta for bound in bounds if bound is not None),
        kl=_kl(reading),
        kl_message_sum=finite(reading.message_sum_kl) if reading else None,
        kl_token_mean=finite(reading.token_mean_kl) if reading else None,
        kl_discounted=finite(reading.discounted_kl) if reading else None,
        kl_in_sample=finite(outcome.optimized.kl),
        kl_bound_in_sample=None if fitted is None else finite(fitted),
        surrogate_gain=finite(reading.gain.mean) if reading else None,
        surrogate_gain_standard_error=finite(reading.gain.standard_error) if reading else None,
        surrogate_gain_in_sample=None if outcome.optimized.gain is None else finite(outcome.optimized.gain),
        learning_rate=outcome.optimized.learning_rate,
        probing_steps=outcome.optimized.probes,
        window_episodes=sum(len(part.episodes) for part in outcome.material.earlier),
        log_ratio_max=finite(reading.log_ratio_max) if reading else None,
        ratio_clip_rate=outcome.optimized.clip_rate,
        gradient_norm=finite(outcome.optimized.gradient_norm),
        gradient_signal=outcome.optimized.gradient_signal,
        optimizer_steps=outcome.optimized.steps,
        stopped_early=outcome.optimized.stopped_early,
        beta=outcome.optimized.beta,
        reward_mean=sum(e.reward for e in episodes) / len(episodes),
        reward_standard_error=standard_error(_group_means(episodes)),
        success_rate=sum(e.success for e in episodes) / len(episodes),
        advantage_clip_rate=outcome.advantages.clip_rate,
        groups=outcome.advantages.groups,
        zero_variance_groups=outcome.advantages.zero_variance_groups,
        advantage_abs_max=float(outcome.advantages.unclipped_E.abs().max()),
        advantage_overflow=float((outcome.advantages.unclipped_E - outcome.advantages.clipped_E).abs().mean()),
        sampler_gap=outcome.gap,
        certificate=None,
        episodes=len(episodes),
        fresh_episodes=len(episodes) if rollout.fresh else 0,
        messages=outcome.messages,
        truncated_messages=sum(m.truncated for e in episodes for m in e.messages),
        overflowed_episodes=sum(e.ended == "overflow" for e in episodes),
        sampled_tokens=tokens,
        trained_tokens=outcome.trained_tokens,
        seconds={"rollout": rollout.seconds, **outcome.seconds},
        tokens_per_second=tokens / max(rollout.seconds, 1e-9) if rollout.fresh else 0.0,
        time=time.time(),
    )


def decision_reason(outcome: UpdateOutcome) -> str:
    """Why the whole step was not taken, in words: out of region, no gain, or nothing to learn from. Empty where it was."""
    if outcome.decision == "skipped":
        return _nothing_to_learn(outcome.version.agent, outcome.messages, outcome.advantages)
    judged, radius = outcome.step.shown, outcome.step.radius or outcome.delta
    if outcome.decision == "accepted" or judged is None:
        return ""
    if outcome.decision == "shrunk":  # what a longer one was short of: the last out of region, else the whole step had no gain
        outside = [reading for reading in outcome.step.readings if not reading.in_region(radius)]
        judged = outside[-1] if outside else outcome.step.readings[0]
    gain, error, in_sample = judged.gain.mean, judged.gain.standard_error, outcome.optimized.gain
    if not math.isfinite(judged.kl.mean) or not math.isfinite(gain):
        return "broken: its KL or its gain is not a finite number"
    if not judged.in_region(radius):
        where = " on the episodes it was fitted to" if judged.kl.bound <= radius else ""
        found = f"out of region: KL bound {judged.bound:.4f} above {radius:g}{where}"
        if outcome.decision != "shrunk":
            return found
        return f"the whole step was {found}" if judged.alpha == 1 else f"a longer step was {found} at x{judged.alpha:.2f}"
    spread = f" ± {error:.4f}" if math.isfinite(error) else ""
    whole = "the whole step had no gain" if outcome.decision == "shrunk" else "no gain"
    fitted = f"; {in_sample:+.4f} on those it was fitted to" if in_sample is not None else ""
    return f"{whole}: {gain:+.4f}{spread} on held-out episodes{fitted}"


def _nothing_to_learn(agent: str, messages: int, advantages: GroupAdvantages) -> str:
    if not messages:
        return f"nothing to learn from: {agent} said nothing"
    equal, groups = advantages.zero_variance_groups, advantages.groups
    left = "" if equal == groups else ", too few are left"
    return f"nothing to learn from: in {equal} of {groups} new groups all episodes earned agent {agent} the same{left}"


def _kl(reading: CandidateReading | None) -> dict[str, KLReading]:
    return {
        name: KLReading(mean=finite(kl.mean), standard_error=finite(kl.standard_error), bound=finite(kl.bound))
        for name, kl in (reading.kl.items() if reading else ())
    }


def finite(value: float) -> float | None:
    """JSON has no infinity, so the bound of a single held-out group and the numbers of a diverged candidate become null."""
    return value if math.isfinite(value) else None


def _group_means(episodes: list[Episode]) -> list[float]:
    groups: dict[int, list[float]] = defaultdict(list)
    for episode in episodes:
        groups[episode.group].append(episode.reward)
    return [sum(rewards) / len(rewards) for rewards in groups.values()]
