"""Why an update was accepted, shrunk, rejected or skipped, in the words of a newcomer."""

from __future__ import annotations

from teamtr_lora.runs.metrics import UpdateRow


def reason(row: UpdateRow) -> str:
    """What the row says; rows of accepted updates leave it out. Not every kind of trust region holds steps back."""
    return row.reason or f"the whole step was {'taken, though outside' if row.out_of_region else 'inside'} the region"


def kind_of_reason(row: UpdateRow) -> str:
    """The part that many updates have in common: out of region, no gain, nothing to learn from."""
    return reason(row).partition(":")[0]
