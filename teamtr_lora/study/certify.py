"""`certify`: the improvement certificates of a run, from its directory alone (thm:stage, thm:stage-hp, app:tightness)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

from teamtr_lora.algorithm.calibration import Calibration, Measured, calibrate
from teamtr_lora.algorithm.certificate import (
    Certificate,
    Confidence,
    Setting,
    UpdateTerms,
    certify_by_turns,
    certify_cached_stage,
    certify_stale_stage,
    clip_bias_bound,
    episode_setting,
    odd_block_mean,
)
from teamtr_lora.algorithm.local_gain import LocalModel, certify_achievable_stage
from teamtr_lora.algorithm.variants.reduction import REDUCTIONS
from teamtr_lora.algorithm.variants.resampling import RESAMPLING
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe
from teamtr_lora.runs.layout import RECIPE
from teamtr_lora.runs.metrics import CertificateTerms, MetricsRow, StageRow, SwapRow, UpdateRow
from teamtr_lora.runs.stored_run import StoredRun, read_run
from teamtr_lora.study.certified import Certified, Replacement, RunCertificates, StageCertificate, UpdateCertificate
from teamtr_lora.study.verdict import certify_verdict
from teamtr_lora.team import most_messages


@dataclass(frozen=True)
class _Run:
    """What all certificates of a run have in common."""

    recipe: Recipe
    setting: Setting  # of the discounted return
    undiscounted: Setting
    end_discount: float | None
    block: int
    beta: float

    @property
    def confidence(self) -> Confidence:
        return Confidence(failure=1 - self.recipe.trust_region.confidence, method="normal")

    @property
    def weighted(self) -> bool:
        """Whether weights make a stage's episodes those of the team just before each update. Recombined, what the others said is
        weighed in the agent's advantage alone, and L is of the team that played."""
        return RESAMPLING[self.recipe.training.resampling].weighted and not self.recipe.team.recombine

    @property
    def dependent(self) -> bool:
        return self.block > 1 or self.beta > 0

    @property
    def distribution_free(self) -> Confidence:
        clip = self.recipe.training.clip_ratio
        return replace(self.confidence, method="hoeffding", ratio_range=clip, block=self.block, beta=self.beta)


def certify_run(folder: Path, block: int = 1, beta: float = 0.0) -> RunCertificates:
    """`block` and `beta`: how far consecutive groups depend on each other, for thm:stage-hp (lem:beta-block)."""
    stored = read_run(folder)
    return certify_rows(stored, stored.rows(), block, beta)


def certify_rows(stored: StoredRun, rows: Sequence[MetricsRow], block: int = 1, beta: float = 0.0) -> RunCertificates:
    """`certify_run` for those who have the run's rows."""
    folder, recipe = stored.path, stored.recipe
    if stored.baseline:
        raise UserError(f"{folder}: a run of `baseline`, which has no trust region to certify; diagnose says how far it went")
    updates = [row for row in rows if isinstance(row, UpdateRow)]
    terms = [row.certificate for row in updates if row.certificate]
    if not terms:
        made = f"none of {len(updates)} updates has been accepted" if updates else "no update has been made yet"
        raise UserError(f"{folder}: {made}, so there is nothing to certify")
    gamma = terms[0].gamma
    end_discount = _end_discount(rows, recipe, gamma)
    low, high = recipe.task.reward_range
    _check_range(folder, updates, low, high)
    raw = whole = Setting(high - low, 1.0, high - low)
    if gamma < 1:
        longest = gamma ** (most_messages(recipe.team) - 1)
        full = end_discount == longest  # else other teams' rewards may come earlier, and count more
        whole = Setting(high - low, gamma, longest * (high - low)) if full else episode_setting(1, low, high, gamma)
    run = _Run(recipe=recipe, setting=whole, undiscounted=raw, end_discount=end_discount, block=block, beta=beta)
    complete = list(_complete_stages(rows))
    if not complete:
        raise UserError(f"{folder}: no stage is complete yet, so there is nothing to certify; let train finish one")
    stages = [_stage(run, own, (before, end.evaluation)) for before, own, end in complete]
    pairs = [(row, after) for _, own, _ in complete for row, after in zip_longest(own, own[1:])]
    single = [_update(run, row, after) for row, after in pairs if row.certificate and row.fresh_episodes]
    swaps = [row for row in rows if isinstance(row, SwapRow)]
    last_swap = max((row.stage for row in swaps), default=-1)
    of_stages, of_stages_by_turns = _calibrations([s for s in stages if s.stage > last_swap])
    of_updates, of_updates_by_turns = _calibrations([u for u in single if u.stage > last_swap])
    found = RunCertificates(
        gamma=gamma,
        confidence=recipe.trust_region.confidence,
        advantage_bound=whole.advantage_bound,
        end_discount=end_discount,
        return_range=whole.return_range,
        largest_weight=max(logged.largest_weight for logged in terms) if run.weighted else None,
        stages=stages,
        updates=single,
        calibration=of_stages,
        by_turns_calibration=of_stages_by_turns,
        update_calibration=of_updates,
        update_by_turns_calibration=of_updates_by_turns,
        replacements=[_replacement(row) for row in swaps],
    )
    return replace(found, verdict=certify_verdict(found, recipe.rollout.items_per_stage))


def _check_range(folder: Path, updates: Sequence[UpdateRow], low: float, high: float) -> None:
    """A_max is made of the recipe's range of rewards: where rewards leave it no bound holds."""
    for row in updates:
        if not low - 1e-9 <= row.reward_mean <= high + 1e-9:
            raise UserError(
                f"{folder / RECIPE}: task.reward_range = [{low:g}, {high:g}], and the mean reward in stage {row.stage} is "
                f"{row.reward_mean:g}; correct the range there: the certificate's A_max is made of it"
            )


def _end_discount(rows: Sequence[MetricsRow], recipe: Recipe, gamma: float) -> float | None:
    """gamma^(T - 1), where every episode had T messages and its whole reward with the last, as far as the rows tell: the counts
    of messages are the same in all of them, and discounted returns are that much of plain ones in L and in evaluations."""
    updates = [row for row in rows if isinstance(row, UpdateRow)]
    if gamma == 1:
        return 1.0
    if recipe.rollout.truncated_messages == "mask" and any(row.truncated_messages for row in updates):
        return None  # those are not among the counts
    spoken = 0.0
    for agent in {row.agent for row in updates}:
        per_episode = {row.messages / max(1, row.episodes) for row in updates if row.agent == agent}
        if len(per_episode) > 1 or any(count % 1 for count in per_episode):
            return None
        spoken += per_episode.pop()
    found = gamma ** (max(1.0, spoken) - 1)  # where nobody speaks the reward comes at once
    pairs = [(row.certificate.surrogate, row.certificate.surrogate_undiscounted) for row in updates if row.certificate]
    evaluations = [row.evaluation for row in rows if not isinstance(row, UpdateRow) and row.evaluation]
    pairs += [(e["mean_return"], e["mean_reward"]) for e in evaluations]
    alike = all(math.isclose(discounted, found * plain, rel_tol=1e-6, abs_tol=1e-9) for discounted, plain in pairs)
    return found if alike else None


def _complete_stages(rows: Sequence[MetricsRow]) -> Iterator[tuple[dict[str, Any] | None, list[UpdateRow], StageRow]]:
    """(the evaluation before, the updates, the end) of every stage. A swap begins anew: the team before the next stage is the
    one it left, and what was updated in a stage that it cut short is no part of that stage."""
    before: dict[str, Any] | None = None
    own: list[UpdateRow] = []
    for row in rows:
        if isinstance(row, UpdateRow):
            own.append(row)
            continue
        if isinstance(row, StageRow) and own:
            yield before, own, row
        before, own = row.evaluation, []


def _replacement(row: SwapRow) -> Replacement:
    change, error = _improvement(row.evaluation_before, row.evaluation, "mean_reward", "mean_reward_standard_error")
    return Replacement(
        after_stage=row.stage, agent=row.agent, how=row.how, old=row.old, new=row.new, change=change, change_standard_error=error
    )


def _stage(
    run: _Run, rows: list[UpdateRow], evaluations: tuple[dict[str, Any] | None, dict[str, Any] | None]
) -> StageCertificate:
    """`evaluations` are those before and after."""
    rollout = list(range(len(rows)) if run.weighted else accumulate(int(row.fresh_episodes > 0) for row in rows))
    fresh = len(set(rollout)) == len(rows)
    accepted = [row.certificate for row in rows if row.certificate]
    zeta = {n: math.fsum(getattr(t, f"zeta_{n}") for t in accepted) / max(1, len(accepted)) for n in ("clip", "ratio", "norm")}
    reward, discounted = (_improvement(*evaluations, w, f"{w}_standard_error") for w in ("mean_reward", "mean_return"))
    return StageCertificate(
        **vars(_certified(run, rows, rollout, reward=reward, discounted=discounted)),
        theorem="thm:stage" if fresh else "cached episodes",
        stale=None if fresh else certify_stale_stage(_discounted_terms(rows), run.setting, None, rollout),
        zeta=zeta,
        achievable=_achievable(rows, run.recipe, run.setting, run.confidence),
    )


def _update(run: _Run, row: UpdateRow, after: UpdateRow | None) -> UpdateCertificate:
    """`after`: the stage's next update, whose episodes the team played with this one made."""
    played = vars(after) if after and after.fresh_episodes else None
    gain, error = _improvement(vars(row), played, "reward_mean", "reward_standard_error")
    discounted: Found = (None, None)
    if gain is not None and run.end_discount is not None:
        discounted = run.end_discount * gain, None if error is None else run.end_discount * error
    bounds = _certified(run, [row], [0], reward=(gain, error), discounted=discounted)
    return UpdateCertificate(**vars(bounds), update=row.update, agent=row.agent, decision=row.decision)


def _certified(run: _Run, rows: list[UpdateRow], rollout: list[int], *, reward: Found, discounted: Found) -> Certified:
    """The bounds of some updates of one stage; those that share a number in `rollout` learned from the same episodes."""
    terms, turns = _discounted_terms(rows), [_terms(row.certificate, discounted=False) for row in rows]
    fresh = len(set(rollout)) == len(rows)
    return Certified(
        stage=rows[0].stage,
        certificate=certify_cached_stage(terms, run.setting, None, rollout),  # thm:stage where each has episodes of its own
        high_probability=certify_cached_stage(terms, run.setting, run.confidence, rollout),
        distribution_free=_distribution_free(run, rows, rollout),
        by_turns=certify_by_turns(turns, run.undiscounted, run.confidence) if fresh else None,
        improvement=reward[0],
        improvement_standard_error=reward[1],
        return_improvement=discounted[0],
        return_improvement_standard_error=discounted[1],
    )


def _discounted_terms(rows: list[UpdateRow]) -> list[UpdateTerms]:
    return [_terms(row.certificate, discounted=True) for row in rows]


def _distribution_free(run: _Run, rows: Sequence[UpdateRow], rollout: Sequence[int]) -> Certificate:
    """thm:stage-hp. L is centred, so its terms are within clip_ratio of zero where the paper's are within 1 + clip_ratio."""
    terms = [UpdateTerms(0.0, 0.0)] * len(rows)
    for i, logged in enumerate(row.certificate for row in rows):
        if logged is None:
            continue
        surrogate = _by_blocks(logged, run.block) if run.dependent else logged.surrogate_clipped
        kl = _kl(logged)
        bias = clip_bias_bound(kl, run.setting.advantage_bound)
        turn_kl, weight = tuple(logged.turn_kl), logged.largest_weight
        terms[i] = UpdateTerms(surrogate, kl, clip_bias=bias, groups=logged.groups, turn_kl=turn_kl, largest_weight=weight)
    return certify_cached_stage(terms, run.setting, run.distribution_free, rollout)


def _by_blocks(logged: CertificateTerms, block: int) -> float:
    """The L that lem:beta-block bounds. With fewer than two full blocks there is no bound, so the plain L is returned."""
    return odd_block_mean(logged.surrogate_clipped_groups, block) if 2 * block <= logged.groups else logged.surrogate_clipped


def _achievable(rows: list[UpdateRow], recipe: Recipe, setting: Setting, confidence: Confidence) -> Certificate | None:
    """thm:info-lower-stage at the radii, where every accepted update of the stage has its local model.

    The model's KL is a message's and the occupancy penalty's is def:kltok: the step that was taken says how the two compare.
    """
    models: list[LocalModel] = []
    radii: list[float] = []
    terms: list[UpdateTerms] = []
    for row in rows:
        if row.certificate is None:
            continue
        fisher = row.probe.fisher if row.probe else None
        if fisher is None or not row.kl_message_sum or not REDUCTIONS[recipe.trust_region.reduction].whole:
            return None
        models.append(LocalModel(fisher.slope, fisher.smoothness / fisher.smallest_eigenvalue))
        radii.append(row.delta)
        radius = row.delta * _kl(row.certificate) / row.kl_message_sum
        error = row.certificate.surrogate_standard_error
        terms.append(UpdateTerms(0.0, radius, groups=row.certificate.groups, standard_error=error))
    return certify_achievable_stage(models, radii, terms, setting, confidence=confidence) if models else None


def _terms(logged: CertificateTerms | None, *, discounted: bool) -> UpdateTerms:
    """An update that was not accepted moved nothing. L is centred and unclipped, so neither zeta nor a clip bias is charged."""
    if logged is None:
        return UpdateTerms(0.0, 0.0)
    return UpdateTerms(
        logged.surrogate if discounted else logged.surrogate_undiscounted,
        _kl(logged) if discounted else logged.kl,
        groups=logged.groups,
        standard_error=logged.surrogate_standard_error if discounted else logged.surrogate_undiscounted_standard_error,
        turn_kl=tuple(logged.turn_kl),
    )


def _kl(logged: CertificateTerms) -> float:
    """Without discount the paper's bounds hold for no step: def:kltok is then 0 for every one, and its factors are infinite."""
    return logged.kl if logged.gamma < 1 else math.inf


Found = tuple[float | None, float | None]  # a difference and its standard error, where they are known


def _improvement(before: dict[str, Any] | None, after: dict[str, Any] | None, what: str, error: str) -> Found:
    """The standard error takes the two as independent; on common seeds it is smaller."""
    if before is None or after is None:
        return None, None
    errors = [measured[error] for measured in (before, after)]
    return after[what] - before[what], None if None in errors else math.hypot(*errors)


def _calibrations(rows: Sequence[Certified]) -> tuple[Calibration | None, Calibration | None]:
    """How the field `certificate` did, and how `by_turns` did; None where nothing was measured."""
    whole = [(r.certificate, r.return_improvement, r.return_improvement_standard_error) for r in rows]
    by_turns = [(r.by_turns, r.improvement, r.improvement_standard_error) for r in rows]
    measured = [[Measured(c, gain, e) for c, gain, e in kind if c and gain is not None] for kind in (whole, by_turns)]
    of_whole, of_turns = (calibrate(kind) if kind else None for kind in measured)
    return of_whole, of_turns
