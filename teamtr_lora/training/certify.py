"""`certify`: the improvement certificates of a run, from its directory alone (thm:stage, thm:stage-hp, app:tightness)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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
    certify_stage,
    certify_stale_stage,
    episode_setting,
)
from teamtr_lora.algorithm.local_gain import LocalModel, certify_achievable_stage
from teamtr_lora.errors import UserError
from teamtr_lora.recipe import Recipe
from teamtr_lora.registry.stored import read_team
from teamtr_lora.training.metrics import CertificateTerms, MetricsRow, StageRow, SwapRow, UpdateRow, read_rows


@dataclass(frozen=True)
class StageCertificate:
    stage: int
    theorem: str  # what bounds it: thm:stage, thm:stage_stale, or the form for episodes that are all used again
    certificate: Certificate
    high_probability: Certificate  # sampling error charged too, by the logged standard errors
    by_turns: Certificate | None  # undiscounted, from each message's KL: the form that can be positive; fresh episodes only
    zeta: dict[str, float]  # mean proxies of the stage's updates, in units of the normalised advantage
    improvement: float | None  # measured mean reward after minus before, held-out items
    improvement_standard_error: float | None
    achievable: Certificate | None = None  # thm:info-lower-stage; None where a probe measured no local gains in this stage


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
    stages: list[StageCertificate]
    calibration: Calibration | None  # of `certificate`; None where no stage has both ends evaluated
    by_turns_calibration: Calibration | None  # both are of the stages since the last replacement
    replacements: list[Replacement]

    def as_dict(self) -> dict[str, Any]:
        return _plain(asdict(self))


def certify_run(folder: Path) -> RunCertificates:
    recipe, _ = read_team(folder)
    rows = read_rows(folder / "metrics.jsonl")
    updates = [row for row in rows if isinstance(row, UpdateRow)]
    terms = [row.certificate for row in updates if row.certificate]
    if not terms:
        raise UserError(f"{folder}: no update has been accepted yet, so there is nothing to certify")
    gamma = terms[0].gamma
    low, high = recipe.task.reward_range
    setting = episode_setting(1, low, high, gamma)
    confidence = Confidence(failure=1 - recipe.trust_region.confidence, method="normal")
    swaps = [row for row in rows if isinstance(row, SwapRow)]
    stages = [
        _stage(end.stage, own, recipe, setting, confidence, _improvement(before, end.evaluation))
        for before, own, end in _complete_stages(rows)
    ]
    latest = [s for s in stages if s.stage > max((row.stage for row in swaps), default=-1)]
    return RunCertificates(
        gamma,
        recipe.trust_region.confidence,
        stages,
        # a reward that comes with the last of H messages counts gamma^(H - 1) in the discounted return, which the bound is about
        _calibration([(s.certificate, s) for s in latest], gamma ** (_messages(recipe, gamma) - 1)),
        _calibration([(s.by_turns, s) for s in latest if s.by_turns], 1.0),
        [_replacement(row) for row in swaps],
    )


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
    setting: Setting,
    confidence: Confidence,
    measured: tuple[float | None, float | None],
) -> StageCertificate:
    resampling = recipe.training.resampling
    theorem, certify = {
        "every_update": ("thm:stage", certify_stage),
        "never": ("cached episodes", certify_cached_stage),
    }.get(resampling, ("thm:stage_stale", certify_stale_stage))
    terms = [_terms(row.certificate, discounted=True) for row in rows]
    accepted = [row.certificate for row in rows if row.certificate]
    zeta = {n: math.fsum(getattr(t, f"zeta_{n}") for t in accepted) / max(1, len(accepted)) for n in ("clip", "ratio", "norm")}
    turns = [_terms(row.certificate, discounted=False) for row in rows]
    return StageCertificate(
        stage,
        theorem,
        certify(terms, setting),
        certify(terms, setting, confidence),
        certify_by_turns(turns, setting, confidence) if resampling == "every_update" else None,
        zeta,
        *measured,
        _achievable(rows, recipe, setting, confidence),
    )


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
        radius = row.delta * row.certificate.kl / row.kl_message_sum
        error = row.certificate.surrogate_standard_error
        terms.append(UpdateTerms(0.0, radius, groups=row.certificate.groups, standard_error=error))
    return certify_achievable_stage(models, radii, terms, setting, confidence) if models else None


def _terms(logged: CertificateTerms | None, *, discounted: bool) -> UpdateTerms:
    """An update that was not accepted moved nothing. L is unbiased and unclipped, so neither zeta nor a clip bias is charged."""
    if logged is None:
        return UpdateTerms(0.0, 0.0)
    return UpdateTerms(
        logged.surrogate if discounted else logged.surrogate_undiscounted,
        logged.kl,
        groups=logged.groups,
        standard_error=logged.surrogate_standard_error if discounted else logged.surrogate_undiscounted_standard_error,
        turn_kl=tuple(logged.turn_kl),
    )


def _improvement(before: dict[str, Any] | None, after: dict[str, Any] | None) -> tuple[float | None, float | None]:
    """The standard error takes the two evaluations as independent; on common seeds it is smaller."""
    if before is None or after is None:
        return None, None
    errors = [evaluation["mean_reward_standard_error"] for evaluation in (before, after)]
    known = all(error is not None for error in errors)
    return after["mean_reward"] - before["mean_reward"], math.hypot(*errors) if known else None


def _messages(recipe: Recipe, gamma: float) -> float:
    return 1 / (1 - gamma) if recipe.training.discount == "auto" and gamma < 1 else 1.0


def _calibration(stages: list[tuple[Certificate, StageCertificate]], scale: float) -> Calibration | None:
    measured = [
        Measured(c, scale * s.improvement, None if s.improvement_standard_error is None else scale * s.improvement_standard_error)
        for c, s in stages
        if s.improvement is not None
    ]
    return calibrate(measured) if measured else None


def _plain(value: Any) -> Any:
    """JSON knows no infinity: a term that nothing bounds becomes null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
