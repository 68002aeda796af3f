"""`certify`: the improvement certificates of a run, from its directory alone (thm:stage, thm:stage-hp, app:tightness)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from teamtr_lora.algorithm.certificate import (
    Calibration,
    Certificate,
    Confidence,
    Measured,
    Setting,
    UpdateTerms,
    calibrate,
    certify_by_turns,
    certify_cached_stage,
    certify_stale_stage,
    clip_bias_bound,
    episode_setting,
)
from teamtr_lora.algorithm.local_gain import LocalModel, certify_achievable_stage
from teamtr_lora.errors import UserError
from teamtr_lora.recipe import Recipe
from teamtr_lora.registry.stored import read_team
from teamtr_lora.team import most_messages
from teamtr_lora.training.metrics import CertificateTerms, MetricsRow, StageRow, SwapRow, UpdateRow, read_rows
from teamtr_lora.training.run_dir import BASELINE


@dataclass(frozen=True)
class StageCertificate:
    stage: int
    theorem: str  # what bounds it: thm:stage, or the form for episodes that several updates learned from
    certificate: Certificate
    high_probability: Certificate  # sampling error charged too, by the logged standard errors
    distribution_free: Certificate | None  # thm:stage-hp: Hoeffding's radius, clipped ratios, their bias; None: an older run
    stale: Certificate | None  # thm:stage_stale, where episodes are used again: the paper's larger penalty for the same L
    by_turns: Certificate | None  # undiscounted, from each message's KL: the form that can be positive; fresh episodes only
    zeta: dict[str, float]  # mean proxies of the stage's updates, in units of the normalised advantage
    improvement: float | None  # measured mean reward after minus before, held-out items: what `by_turns` is about
    improvement_standard_error: float | None
    return_improvement: float | None  # of the discounted return, which `certificate` is about; None: not evaluated, or not known
    return_improvement_standard_error: float | None
    achievable: Certificate | None = None  # thm:info-lower-stage; None where a probe measured no local gains in this stage

    @property
    def slack(self) -> float | None:
        """How far above the bound the stage came out; negative is a violation, of the measured value at least."""
        return None if self.return_improvement is None else self.return_improvement - self.certificate.bound

    @property
    def by_turns_slack(self) -> float | None:
        return None if self.improvement is None or self.by_turns is None else self.improvement - self.by_turns.bound

    def as_dict(self) -> dict[str, Any]:
        """Every field; each certificate with the sum of its penalties and the share of each."""
        found = asdict(self)
        for name, value in vars(self).items():
            if isinstance(value, Certificate):
                found[name] |= {"penalty": value.penalty, "shares": value.shares()}
        slack, turns = self.slack, self.by_turns_slack
        violated = None if slack is None else slack < 0
        return found | {"slack": slack, "violated": violated, "by_turns_slack": turns}


@dataclass(frozen=True)
class Replacement:
    """A swap or an undo. No theorem bounds it (prop:pnp); from here on the certificates are about another team."""

    after_stage: int
    agent: str
    how: str
    old: str
    new: str
    change: float | None  # measured mean reward after minus before, held-out items
    change_standard_error: float | None


@dataclass(frozen=True)
class RunCertificates:
    gamma: float
    confidence: float
    advantage_bound: float  # A_max
    end_discount: float | None  # what every reward counts in the discounted return; None: they come at various turns
    return_range: float  # largest less smallest return: a bound below minus that is vacuous
    stages: list[StageCertificate]
    calibration: Calibration | None  # of `certificate`; None where no stage has both ends evaluated
    by_turns_calibration: Calibration | None  # both are of the stages since the last replacement
    replacements: list[Replacement]

    @property
    def since(self) -> str:
        """Which stages the calibrations are of, where not of all."""
        if not self.replacements:
            return ""
        last = self.replacements[-1]
        return f"since the {'undo' if last.how == 'undo' else 'swap'} after stage {last.after_stage}"

    def as_dict(self) -> dict[str, Any]:
        stages = [stage.as_dict() for stage in self.stages]
        return _plain(asdict(self) | {"stages": stages, "calibrated": self.since or "all stages"})


def read_run(folder: Path) -> tuple[Recipe, list[MetricsRow]]:
    """A run directory's recipe and what it has logged."""
    if not (folder / "recipe.yaml").is_file():
        raise UserError(
            f"{folder}: no run here (recipe.yaml is missing); give the folder that train printed: a team of the registry has no "
            "record of its training"
        )
    return read_team(folder)[0], read_rows(folder / "metrics.jsonl")


def certify_run(folder: Path) -> RunCertificates:
    recipe, rows = read_run(folder)
    if (folder / BASELINE).is_file():
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
    confidence = Confidence(failure=1 - recipe.trust_region.confidence, method="normal")
    swaps = [row for row in rows if isinstance(row, SwapRow)]
    stages = [
        _stage(end.stage, own, recipe, (whole, raw), confidence, (before, end.evaluation), end_discount)
        for before, own, end in _complete_stages(rows)
    ]
    if not stages:
        raise UserError(f"{folder}: no stage is complete yet, so there is nothing to certify; let train finish one")
    latest = [s for s in stages if s.stage > max((row.stage for row in swaps), default=-1)]
    return RunCertificates(
        gamma,
        recipe.trust_region.confidence,
        whole.advantage_bound,
        end_discount,
        whole.return_range,
        stages,
        _calibration([(s.certificate, s.return_improvement, s.return_improvement_standard_error) for s in latest]),
        _calibration([(s.by_turns, s.improvement, s.improvement_standard_error) for s in latest]),
        [_replacement(row) for row in swaps],
    )


def _check_range(folder: Path, updates: Sequence[UpdateRow], low: float, high: float) -> None:
    """A_max is made of the recipe's range of rewards: where rewards leave it no bound holds."""
    for row in updates:
        if not low - 1e-9 <= row.reward_mean <= high + 1e-9:
            raise UserError(
                f"{folder / 'recipe.yaml'}: task.reward_range = [{low:g}, {high:g}], and the mean reward in stage {row.stage} is "
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
    pairs += [(e["mean_return"], e["mean_reward"]) for e in evaluations if "mean_return" in e]
    alike = all(math.isclose(discounted, found * plain, rel_tol=1e-6, abs_tol=1e-9) for discounted, plain in pairs)
    return found if alike else None


def _complete_stages(rows: list[MetricsRow]) -> Iterator[tuple[dict[str, Any] | None, list[UpdateRow], StageRow]]:
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
    change, error = _improvement(row.evaluation_before, row.evaluation)
    return Replacement(row.stage, row.agent, row.how, row.old, row.new, change, error)


def _stage(
    stage: int,
    rows: list[UpdateRow],
    recipe: Recipe,
    settings: tuple[Setting, Setting],
    confidence: Confidence,
    evaluations: tuple[dict[str, Any] | None, dict[str, Any] | None],
    end_discount: float | None,
) -> StageCertificate:
    """`settings` are of the discounted and of the undiscounted return, `evaluations` before and after."""
    setting, undiscounted = settings
    rollout = list(accumulate(int(row.fresh_episodes > 0) for row in rows))
    fresh = len(set(rollout)) == len(rows)
    terms = [_terms(row.certificate, discounted=True) for row in rows]
    accepted = [row.certificate for row in rows if row.certificate]
    zeta = {n: math.fsum(getattr(t, f"zeta_{n}") for t in accepted) / max(1, len(accepted)) for n in ("clip", "ratio", "norm")}
    turns = [_terms(row.certificate, discounted=False) for row in rows]
    return StageCertificate(
        stage,
        "thm:stage" if fresh else "cached episodes",
        certify_cached_stage(terms, setting, None, rollout),  # thm:stage where every update has episodes of its own
        certify_cached_stage(terms, setting, confidence, rollout),
        _distribution_free(rows, rollout, recipe, setting),
        None if fresh else certify_stale_stage(terms, setting, None, rollout),
        certify_by_turns(turns, undiscounted, confidence) if fresh else None,
        zeta,
        *_improvement(*evaluations),
        *_return_improvement(*evaluations, end_discount),
        _achievable(rows, recipe, setting, confidence),
    )


def _distribution_free(rows: Sequence[UpdateRow], rollout: Sequence[int], recipe: Recipe, setting: Setting) -> Certificate | None:
    """thm:stage-hp. L is centred, so its terms are within clip_ratio of zero where the paper's are within 1 + clip_ratio."""
    terms = [UpdateTerms(0.0, 0.0)] * len(rows)
    for i, logged in enumerate(row.certificate for row in rows):
        if logged is None:
            continue
        if logged.surrogate_clipped is None:
            return None
        kl = _kl(logged)
        bias = clip_bias_bound(kl, setting.advantage_bound)
        terms[i] = UpdateTerms(logged.surrogate_clipped, kl, clip_bias=bias, groups=logged.groups)
    confidence = Confidence(1 - recipe.trust_region.confidence, ratio_range=recipe.training.clip_ratio)
    return certify_cached_stage(terms, setting, confidence, rollout)


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
        if fisher is None or not row.kl_message_sum or recipe.trust_region.reduction != "message_sum":
            return None
        models.append(LocalModel(fisher.slope, fisher.smoothness / fisher.smallest_eigenvalue))
        radii.append(row.delta)
        radius = row.delta * _kl(row.certificate) / row.kl_message_sum
        error = row.certificate.surrogate_standard_error
        terms.append(UpdateTerms(0.0, radius, groups=row.certificate.groups, standard_error=error))
    return certify_achievable_stage(models, radii, terms, setting, confidence) if models else None


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


def _improvement(before: dict[str, Any] | None, after: dict[str, Any] | None, what: str = "mean_reward") -> Found:
    """The standard error takes the two evaluations as independent; on common seeds it is smaller."""
    if before is None or after is None:
        return None, None
    errors = [evaluation[f"{what}_standard_error"] for evaluation in (before, after)]
    known = all(error is not None for error in errors)
    return after[what] - before[what], math.hypot(*errors) if known else None


def _return_improvement(before: dict[str, Any] | None, after: dict[str, Any] | None, end_discount: float | None) -> Found:
    """Of the discounted return, which L and the bound are about. Evaluations of older runs have only mean rewards: those can be
    discounted where every reward counts the same, and say nothing in these units where not."""
    if all(evaluation is not None and "mean_return" in evaluation for evaluation in (before, after)):
        return _improvement(before, after, "mean_return")
    gain, error = _improvement(before, after)
    if gain is None or end_discount is None:
        return None, None
    return end_discount * gain, None if error is None else end_discount * error


def _calibration(stages: Sequence[tuple[Certificate | None, float | None, float | None]]) -> Calibration | None:
    """Of (bound, measured, its standard error)."""
    measured = [Measured(c, found, error) for c, found, error in stages if c is not None and found is not None]
    return calibrate(measured) if measured else None


def _plain(value: Any) -> Any:
    """JSON knows no infinity: a term that nothing bounds becomes null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
