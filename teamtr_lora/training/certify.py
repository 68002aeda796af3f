"""`certify`: the improvement certificates of a run, from its directory alone (thm:stage, thm:stage-hp, app:tightness)."""

from __future__ import annotations

import math
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
from teamtr_lora.errors import UserError
from teamtr_lora.recipe import Recipe
from teamtr_lora.rollout.records import read_team
from teamtr_lora.training.metrics import CertificateTerms, StageRow, UpdateRow, read_rows


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


@dataclass(frozen=True)
class RunCertificates:
    gamma: float
    confidence: float
    stages: list[StageCertificate]
    calibration: Calibration | None  # of `certificate`; None where no stage has both ends evaluated
    by_turns_calibration: Calibration | None

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
    ends = {row.stage: row for row in rows if isinstance(row, StageRow)}
    stages = [
        _stage(stage, [row for row in updates if row.stage == stage], recipe, setting, confidence, ends)
        for stage in sorted({row.stage for row in updates} & ends.keys())
    ]
    return RunCertificates(
        gamma,
        recipe.trust_region.confidence,
        stages,
        # a reward that comes with the last of H messages counts gamma^(H - 1) in the discounted return, which the bound is about
        _calibration([(s.certificate, s) for s in stages], gamma ** (_messages(recipe, gamma) - 1)),
        _calibration([(s.by_turns, s) for s in stages if s.by_turns], 1.0),
    )


def _stage(
    stage: int, rows: list[UpdateRow], recipe: Recipe, setting: Setting, confidence: Confidence, ends: dict[int, StageRow]
) -> StageCertificate:
    resampling = recipe.training.resampling
    theorem, certify = {
        "every_update": ("thm:stage", certify_stage),
        "never": ("cached episodes", certify_cached_stage),
    }.get(resampling, ("thm:stage_stale", certify_stale_stage))
    terms = [_terms(row.certificate, discounted=True) for row in rows]
    improvement, error = _improvement(ends.get(stage - 1), ends.get(stage))
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
        improvement,
        error,
    )


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


def _improvement(before: StageRow | None, after: StageRow | None) -> tuple[float | None, float | None]:
    """The standard error takes the two evaluations as independent; on common seeds it is smaller."""
    if before is None or after is None or before.evaluation is None or after.evaluation is None:
        return None, None
    errors = [row.evaluation["mean_reward_standard_error"] for row in (before, after) if row.evaluation]
    known = all(error is not None for error in errors)
    return after.evaluation["mean_reward"] - before.evaluation["mean_reward"], math.hypot(*errors) if known else None


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
