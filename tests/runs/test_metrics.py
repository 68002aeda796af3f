"""The schema of metrics.jsonl is its documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from teamtr_lora.runs.metrics import CertificateTerms, KLReading, StageRow, SwapRow, UpdateRow


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every model that a field of this type may hold, the models inside it included."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from _models(field.annotation)
    for part in get_args(annotation):
        yield from _models(part)


def test_every_field_of_every_row_is_described() -> None:
    models = {model for row in (UpdateRow, StageRow, SwapRow) for model in _models(row)}
    assert {UpdateRow, StageRow, SwapRow, KLReading, CertificateTerms} < models  # and the diagnostics' own
    bare = [f"{m.__name__}.{name}" for m in models for name, field in m.model_fields.items() if not field.description]
    assert not bare, f"no Field(description=...): {', '.join(sorted(bare))}"
