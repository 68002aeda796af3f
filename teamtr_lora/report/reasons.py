"""Why an update was accepted, shortened, rejected or skipped, in the words of a newcomer."""

from __future__ import annotations

from teamtr_lora.runs.metrics import UpdateRow


def reason(row: UpdateRow, estimator: str) -> str:
    """What the row says, or what its numbers tell where a row of an older run says nothing. `estimator` is the gate's KL."""
    if row.reason or row.decision == "accepted":
        return row.reason or "the whole step was inside the region and gained"
    if row.decision == "skipped":
        equal = f"in {row.zero_variance_groups} of {row.groups} groups all rewards are equal"
        return f"nothing to learn from: {equal if row.messages else 'the agent said nothing'}"
    if row.decision == "shrunk":
        return f"the whole step was too long or had no gain: {row.alpha:.2f} of it was taken"
    bound = row.kl[estimator].bound if estimator in row.kl else None
    if bound is None or bound > row.delta:
        return f"out of region: the KL bound of the shortest step tried is above {row.delta:g}"
    return "no gain: no step length inside the region was better on held-out episodes"


def kind_of_reason(row: UpdateRow, estimator: str) -> str:
    """The part that many updates have in common: out of region, no gain, nothing to learn from."""
    return reason(row, estimator).partition(":")[0]
