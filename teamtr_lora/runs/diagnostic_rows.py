"""The diagnostics fields of an update's row in metrics.jsonl."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Row(BaseModel):
    """Strict, as the rows of a run may come from anywhere."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class SpreadReading(Row):
    """How a quantity is spread."""

    p50: float = Field(description="median, in the quantity's own unit")
    p90: float = Field(description="90th percentile")
    p99: float = Field(description="99th percentile")
    largest: float = Field(description="maximum")


class MonitorReading(Row):
    """One KL estimator on random parts of the token positions (app:exp:klcal)."""

    deviations: list[float] = Field(description="|part - all| / delta of each random part")
    flips: int | None = Field(description="parts on the other side of delta; null where all of it is not within 0.8 to 1.2 delta")


class ExcessReading(Row):
    """A distance and what two samples of one policy would show; the difference is the signal, and may be negative."""

    value: float = Field(
        description="total variation, 0 to 1, between one team's contexts on half the groups and the other's on the rest"
    )
    null: float = Field(description="the same within the later team's own contexts")
    coupled: float | None = Field(
        default=None,
        description="probes: share of contexts whose key differs where both teams play with the same random numbers; never below "
        "the total variation on average (coupling inequality), and 0 for one team",
    )


class UpdateDiagnostics(Row):
    """What an update's own numbers tell, on its held-out messages, at the alpha that the row's `kl` is of."""

    kl_messages: SpreadReading | None = Field(description="exact KL of each message, nats; null where nothing was measured")
    kl_groups: SpreadReading | None = Field(description="its means over groups")
    messages_over_delta: float | None = Field(description="share of messages whose own KL is above delta; null with token_mean")
    monitor: dict[str, dict[str, MonitorReading]] = Field(
        description="by estimator, then by the share of token positions in percent; in the recipe's reduction "
        "(token_mean: over all tokens)"
    )
    context_shift: ExcessReading | None = Field(
        description="TV of coarse context keys between the stage's first rollout and this update's own: one term of D_occ; null "
        "for a stage's first update and where the update has no rollout of its own"
    )


class GapReading(Row):
    """Gap_i: the surrogate of the accepted candidate on stage-start episodes minus on the current team's (raw reward)."""

    value: float = Field(description="mean |stale - fresh| over random halves of the items, one half a side")
    null: float = Field(description="the same with fresh - fresh: what noise alone shows")
    signed: float = Field(description="stale - fresh over all groups")
    standard_error: float = Field(description="of `signed`, paired by item")
    stale: float = Field(description="surrogate on stage-start episodes")
    fresh: float = Field(description="surrogate on episodes of the team as it was before the update")


class TokenShiftReading(Row):
    """Mean token probability by rank before the update; the last entry is the rest of the vocabulary."""

    step: float = Field(description="in units of the step that was taken")
    before: list[float] = Field(description="mean probability by rank, before the update")
    after: list[float] = Field(description="of the same tokens after the step")
    moved: list[float] = Field(description="mean |change|")
    flip_rate: float = Field(description="share of positions whose most probable token changed")


class FisherReading(Row):
    """thm:info-lower-stage's quantities of one update, from per-message gradients (training/fisher.py)."""

    messages: int = Field(description="whose gradients were taken")
    damping: float = Field(description="epsilon of F + epsilon I: a tenth of F's mean nonzero eigenvalue")
    slope: float = Field(description="kappa, cross-fitted: the gradient's halves come from different groups")
    slope_in_sample: float = Field(description="kappa from one set of messages: too high, noise is fitted too")
    smallest_eigenvalue: float = Field(description="of F + epsilon I")
    smoothness: float = Field(description="of the surrogate along the step taken, at least 0; a lower estimate of L_loc")
    step_kl: float = Field(description="1/2 d' F d of the accepted step d: the quadratic model of its KL, nats a message")
    measured_kl: float = Field(description="what the gate measured for the same step, nats a message")


class ProbeReading(Row):
    """An update seen from episodes that nobody learned from, by the stage's first team and by the team as it was."""

    episodes: int = Field(description="played for this reading, by the team as it was before the update")
    tokens: int = Field(description="sampled for them")
    gap: GapReading | None = Field(description="null where nothing was accepted")
    context_shift: ExcessReading = Field(description="one term of D_occ, between the two teams")
    weights: dict[str, float] = Field(
        description="trajectory weights from the stage's first team to this one: ess, p95, p99, largest, over_ten, mean, "
        "mean_standard_error (app:exp:isdeg)"
    )
    token_shift: dict[str, TokenShiftReading] | None = Field(
        description="in_region: the accepted step; out_of_region: as long as 10 delta asks; null for all but a stage's "
        "first accepted update"
    )
    fisher: FisherReading | None = Field(
        description="null where nothing was accepted, messages were too few, or diagnostics.fisher_messages is 0"
    )
