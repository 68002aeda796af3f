"""How runs stand, at a glance: one small file each, so that a folder with hundreds of them is listed at once."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.locks import held
from teamtr_lora.recipe import yaml_text
from teamtr_lora.runs import layout
from teamtr_lora.runs.layout import is_baseline, is_run, read_own
from teamtr_lora.runs.metrics import StageRow, has_rows, read_rows
from teamtr_lora.runs.run_state import COUNTS, CheckpointReader, RunState

State = Literal["starting", "training", "finished", "stopped", "damaged"]


@dataclass(frozen=True, kw_only=True)
class RunStanding:
    """A line of the table of runs."""

    name: str  # the folder's, below the one that was listed
    state: State
    stage: int = 0  # complete ones
    stages: int = 0  # that the recipe asks for
    accuracy_before: float | None = None
    accuracy_now: float | None = None
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    sampled_tokens: int = 0
    seconds: float = 0.0
    seconds_left: float | None = None  # of a run that trains, once it has made an update
    changed: float = 0.0  # Unix time of the newest file
    problem: str = ""


def find_runs(folder: Path, depth: int = 3) -> list[Path]:
    """The run directories in a folder: the folder itself where it is one, else those at most `depth` folders down."""
    if is_run(folder):
        return [folder]
    try:
        with os.scandir(folder) as entries:
            inside = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name[0] != ".")
    except OSError as error:
        raise UserError(f"{folder}: cannot be listed ({error.strerror}); give the folder that holds the runs") from error
    return [run for name in inside if depth for run in find_runs(folder / name, depth - 1)]


def standing(run: Path, name: str) -> RunStanding:
    """`name` is what the run is called. What is damaged is said in the line, as one run must not hide the others."""
    try:
        return _standing(run, name)
    except UserError as error:
        return RunStanding(name=name, state="damaged", problem=" ".join(str(error).split()))


def _standing(run: Path, name: str) -> RunStanding:
    stages, busy = _planned_stages(run), held(run / layout.LOCK)
    state = _from_rows(run) if is_baseline(run) else _from_checkpoint(run)
    if state is None:
        return RunStanding(name=name, state="starting" if busy else "stopped", stages=stages, changed=_changed(run))
    done = state.stage >= stages
    return RunStanding(
        name=name,
        state="training" if busy else "finished" if done else "stopped",
        stage=state.stage,
        stages=stages,
        accuracy_before=state.accuracy_before,
        accuracy_now=state.accuracy_after,
        counts=state.counts,
        sampled_tokens=state.sampled_tokens,
        seconds=state.seconds,
        seconds_left=_seconds_left(state, stages) if busy and not done else None,
        changed=_changed(run),
    )


def _from_checkpoint(run: Path) -> RunState | None:
    checkpoints = CheckpointReader(run)
    try:
        return checkpoints.state() if checkpoints.exists() else None
    except (UserError, IndexError):  # a run at work may have put a newer one in its place just now
        return checkpoints.state()


def _from_rows(run: Path) -> RunState | None:
    """A run of `baseline` has checkpoints of its own kind."""
    stages = [row for row in (read_rows(run) if has_rows(run) else []) if isinstance(row, StageRow)]
    if not stages:
        return None
    last, accuracies = stages[-1], [row.evaluation["avg_at_k"] for row in stages if row.evaluation] or [None]
    return RunState(
        stage=last.stage,
        counts={name: getattr(last, name) for name in COUNTS},
        sampled_tokens=last.sampled_tokens,
        seconds=last.seconds,
        accuracy_before=accuracies[0],
        accuracy_after=accuracies[-1],
    )


def _seconds_left(state: RunState, stages: int) -> float | None:
    """By the time that an update has taken so far, evaluations included."""
    done = state.counts["updates"]
    agents = max(1, len(state.versions))
    left = (stages - state.stage) * agents - state.update
    return state.seconds / done * left if done else None


def _planned_stages(run: Path) -> int:
    """Out of the recipe's text: to check all of a recipe takes some fifty times as long."""
    try:
        text = (read_own(run / layout.RECIPE, yaml_text.MAX_BYTES) or b"").decode()
        return int(yaml_text.parse(text, str(run / layout.RECIPE), fast=True)["training"]["stages"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{run / layout.RECIPE}: damaged ({type(error).__name__})") from error


def last_changes(run: Path) -> tuple[int, ...]:
    """When what `standing` tells of was last written: while this is the same, so is its line, unless somebody trains."""
    return tuple(_modified(run / name) for name in (layout.METRICS, layout.RECIPE, layout.TEAM, layout.CHECKPOINTS))


def _changed(run: Path) -> float:
    times = [_modified(run / name) for name in (layout.METRICS, layout.ORIGIN, layout.RECIPE)]
    return next((time / 1e9 for time in times if time), 0.0)


def _modified(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0
