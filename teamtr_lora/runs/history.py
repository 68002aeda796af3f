"""What a run directory remembers of its team: which adapters were swapped in or rebased, and how the team did as it is now."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teamtr_lora.base.adapter_files import parse_json, read_regular
from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.common.errors import UserError
from teamtr_lora.registry.manifest import MadeBy, Replaced, one_line, version_name

MAX_METRICS_BYTES = 1 << 30
MAX_RECORD_BYTES = 64 << 20
REBASE_RECORD = "rebase.json"  # in a run directory that `rebase` made: where its team came from, and how it was measured


@dataclass(frozen=True)
class RunHistory:
    made_by: dict[str, MadeBy]
    lineage: list[Replaced]  # by the run's own version names, oldest first
    metrics: dict[str, float]
    stale: bool  # the run was evaluated, but not as it is now


def read_history(run: Path, versions: Mapping[str, AdapterVersion]) -> RunHistory:
    """`versions`: the run's team."""
    names = {agent: version.name for agent, version in versions.items()}
    rebase = _record(run / REBASE_RECORD)
    try:
        lineage = [*_rebased(rebase, names), *_swapped(_newest_state(run))]
        made_by = {agent: _made_by(names[agent], [step for step in lineage if step.agent == agent]) for agent in names}
        evaluations = [*_rebase_evaluations(rebase), *_evaluations(run / "metrics.jsonl")]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{run}: its checkpoint, {REBASE_RECORD} or metrics.jsonl is damaged ({type(error).__name__})") from error
    own = [evaluation for of, evaluation in evaluations if of == names]
    metrics = _flat(own[-1], "") if own else {}
    return RunHistory(made_by, lineage, metrics, bool(evaluations) and not own)


def _made_by(version: str, steps: list[Replaced]) -> MadeBy:
    """A version that no replacement brought was trained."""
    how = next((step.how.partition(" ")[0] for step in reversed(steps) if step.new == version), "train")
    return {"stage0": "stage0", "direct": "swap", "rebase": "rebase"}.get(how, "train")  # type: ignore[return-value]


def _swapped(state: Mapping[str, Any]) -> list[Replaced]:
    """The replacements that stand: an undo takes the last one back."""
    standing: list[Replaced] = []
    for record in state.get("swaps", []):
        if record["how"] == "undo":
            standing = standing[:-1]
            continue
        agent = record["agent"]
        old, new = (version_name(**record[when][agent]) for when in ("before", "after"))
        standing.append(Replaced(agent=agent, old=old, new=new, how=one_line(f"{record['how']} from {record['source']}")))
    return standing


def _rebased(record: Mapping[str, Any] | None, names: Mapping[str, str]) -> list[Replaced]:
    if record is None:
        return []
    report = record["report"]
    how = one_line(f"rebase from {report['old_base']}")
    return [Replaced(agent=a, old=report["old_versions"][a], new=report["versions"][a], how=how) for a in names]


def _newest_state(run: Path) -> Mapping[str, Any]:
    steps = sorted((run / "checkpoint").glob("step-*")) if (run / "checkpoint").is_dir() else []
    found = _record(steps[-1] / "state.json") if steps else None
    return found["state"] if found else {}


def _rebase_evaluations(record: Mapping[str, Any] | None) -> list[tuple[Any, Mapping[str, Any]]]:
    return [(record["report"]["versions"], record["report"]["aligned"]["evaluation"])] if record else []


def _evaluations(path: Path) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """(versions of the team, how it did), oldest first."""
    if not path.is_file():
        return
    for line in read_regular(path, MAX_METRICS_BYTES).splitlines():
        row = parse_json(line, str(path))
        if isinstance(evaluation := row.get("evaluation"), dict):
            yield row.get("versions"), evaluation


def _record(path: Path) -> dict[str, Any] | None:
    return parse_json(read_regular(path, MAX_RECORD_BYTES), str(path)) if path.is_file() else None


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            found[f"{prefix}{name}"] = float(value)
    return found
