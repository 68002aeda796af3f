"""The schema of metrics.jsonl is its documentation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from teamtr_lora.common.errors import UserError
from teamtr_lora.runs.metrics import CertificateTerms, KLReading, StageRow, SwapRow, UpdateRow, checksummed, parse_row


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": None}, "steps: Input should be a valid integer"),
        ({"kl_after": {"mean": "much", "standard_error": None, "bound": 0.1}}, "kl_after.mean: Input should be a valid number"),
        ({"of_tomorrow": 1}, "of_tomorrow: Extra inputs are not permitted"),
        ({"evaluation": {"episodes": "many"}}, "evaluation.episodes: Input should be a valid integer"),
        ({"x" * 500: "\n"}, "x" * 200 + ")"),
    ],
)
def test_a_row_that_does_not_fit_is_told_by_the_field(change: dict[str, Any], said: str) -> None:
    """A row of another version: which field is new there, or missing, is what its reader can act on."""
    row = SwapRow(stage=1, agent="solver", how="undo", source="", old="v1", new="v0", versions={}, time=0.0).model_dump()
    assert parse_row(checksummed(json.dumps(row).encode()), "line 1") == SwapRow(**row)
    with pytest.raises(UserError) as error:
        parse_row(checksummed(json.dumps(row | change).encode()), "line 1")
    assert str(error.value).startswith("line 1 is damaged or of another version of teamtr-lora (")
    assert said in str(error.value) and "\n" not in str(error.value)
