"""What a run directory remembers of its team: which adapters were swapped in or rebased, and how the team does as it is now."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from teamtr_lora.base.versions import AdapterVersion, version_names
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.flat import flat
from teamtr_lora.runs.layout import REBASE, read_own_json
from teamtr_lora.runs.metrics import StageRow, SwapRow, has_rows, read_rows
from teamtr_lora.runs.run_state import CheckpointReader

Origin = Literal["train", "swap", "stage0", "rebase"]
_ORIGINS: dict[str, Origin] = {"stage0": "stage0", "direct": "swap", "rebase": "rebase"}


@dataclass(frozen=True)
class Replaced:
    """One agent's adapter became another one, other than by training."""

    agent: str
    old: str  # version names
    new: str
    how: Literal["stage0", "direct", "rebase"]
    source: str  # what the new one was made from


@dataclass(frozen=True)
class RunHistory:
    """Where a run's team comes from, and how good it is."""

    made_by: dict[str, Origin]  # each agent's current version
    lineage: list[Replaced]  # by the run's own version names, oldest first; what was undone is left out
    metrics: dict[str, float]  # of the last evaluation of the team as it is now; empty where there is none
    stale: bool  # the run was evaluated, but not as it is now


def read_rebase(run: Path) -> dict[str, Any] | None:
    """What `RunDir.write_rebase` wrote, its `request` and its `report`; None in a run that no `rebase` made."""
    data = read_own_json(run / REBASE)
    if data is not None and not (isinstance(data.get("request"), dict) and isinstance(data.get("report"), dict)):
        raise UserError(f"{run / REBASE}: damaged (it holds no request and report)")
    return data


def read_history(run: Path, versions: Mapping[str, AdapterVersion]) -> RunHistory:
    """`versions`: the run's team, as `read_run` gives it."""
    names, rebase, checkpoints = version_names(versions), read_rebase(run), CheckpointReader(run)
    lineage: list[Replaced] = []
    evaluations: list[tuple[dict[str, str], dict[str, Any]]] = []  # of which versions, oldest first
    if rebase:
        try:
            report = rebase["report"]
            for agent in names:
                old, new = str(report["old_versions"][agent]), str(report["versions"][agent])
                lineage.append(Replaced(agent, old, new, how="rebase", source=str(report["old_base"])))
            evaluations.append((report["versions"], dict(report["aligned"]["evaluation"])))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{run / REBASE}: damaged ({type(error).__name__}: {error})") from error
    for swap in checkpoints.state().standing_swaps() if checkpoints.exists() else []:
        old, new = swap.before[swap.agent].name, swap.after[swap.agent].name
        lineage.append(Replaced(swap.agent, old, new, how=swap.how, source=swap.source))  # type: ignore[arg-type]
    for row in read_rows(run) if has_rows(run) else []:
        if isinstance(row, StageRow | SwapRow) and row.evaluation:
            evaluations.append((row.versions, row.evaluation))
    own = [evaluation for of, evaluation in evaluations if of == names]
    return RunHistory(
        made_by={agent: _made_by(name, [step for step in lineage if step.agent == agent]) for agent, name in names.items()},
        lineage=lineage,
        metrics=_numbers(own[-1]) if own else {},
        stale=bool(evaluations) and not own,
    )


def _made_by(version: str, steps: list[Replaced]) -> Origin:
    """The last replacement that ended in this version; training made it where none did."""
    how = next((step.how for step in reversed(steps) if step.new == version), None)
    return _ORIGINS[how] if how else "train"


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers in nested mappings, by their keys joined with slashes."""
    numbers = {name: float(value) for name, value in flat(values, "/").items() if type(value) in (int, float)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
