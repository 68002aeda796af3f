"""What `certify` finds: the bounds of each stage and update beside what was measured."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from teamtr_lora.algorithm.calibration import Calibration
from teamtr_lora.algorithm.certificate import Certificate


@dataclass(frozen=True, kw_only=True)
class Certified:
    """Bounds of a stage or of one update, and what was measured."""

    stage: int
    certificate: Certificate
    high_probability: Certificate  # sampling error charged too, by the logged standard errors
    distribution_free: Certificate  # thm:stage-hp: Hoeffding's radius, clipped ratios, their bias
    by_turns: Certificate | None  # undiscounted, from each message's KL: the form that can be positive; fresh episodes only
    improvement: float | None  # measured mean reward after minus before: what `by_turns` is about
    improvement_standard_error: float | None
    return_improvement: float | None  # of the discounted return, which `certificate` is about; None: not measured, or not known
    return_improvement_standard_error: float | None

    @property
    def slack(self) -> float | None:
        """How far above the bound it came out; negative is a violation, of the measured value at least."""
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


@dataclass(frozen=True, kw_only=True)
class StageCertificate(Certified):
    """Measured on the held-out items of the evaluations before and after."""

    theorem: str  # what bounds it: thm:stage, or the form for episodes that several updates learned from
    stale: Certificate | None  # thm:stage_stale, where episodes are used again: the paper's larger penalty for the same L
    zeta: dict[str, float]  # mean proxies of the stage's updates, in units of the normalised advantage
    achievable: Certificate | None = None  # thm:info-lower-stage; None where a probe measured no local gains in this stage


@dataclass(frozen=True, kw_only=True)
class UpdateCertificate(Certified):
    """thm:single, for accepted updates that learned from episodes of their own; the failure probability is this update's alone.
    Measured on training items: the next update's episodes, which the team played with this one made, against its own."""

    update: int
    agent: str
    decision: str


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
    largest_weight: float | None  # of an episode that L and the KL are made of; None: all count the same
    stages: list[StageCertificate]
    updates: list[UpdateCertificate]  # of these stages
    calibration: Calibration | None  # of `certificate`; None where no stage has both ends evaluated
    by_turns_calibration: Calibration | None  # both are of the stages since the last replacement
    update_calibration: Calibration | None  # the same of single updates
    update_by_turns_calibration: Calibration | None
    replacements: list[Replacement]
    verdict: list[str] = field(default_factory=list)  # in plain words, what to do next last

    @property
    def since(self) -> str:
        """Which stages the calibrations are of, where not of all."""
        if not self.replacements:
            return ""
        last = self.replacements[-1]
        return f"since the {'undo' if last.how == 'undo' else 'swap'} after stage {last.after_stage}"

    def as_dict(self) -> dict[str, Any]:
        certified = {"stages": [s.as_dict() for s in self.stages], "updates": [u.as_dict() for u in self.updates]}
        return _without_infinities(asdict(self) | certified | {"calibrated": self.since or "all stages"})


def _without_infinities(value: Any) -> Any:
    """JSON has no infinity, so a term that nothing bounds becomes null."""
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
