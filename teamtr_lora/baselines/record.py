"""baseline.json: what a baseline's run is and how far it is. Written last, it is the commit point of every update."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json, write_atomic
from teamtr_lora.recipe import Recipe, first_difference, load_recipe
from teamtr_lora.runs.run_dir import BASELINE, MAY_CHANGE
from teamtr_lora.training.trainer import TrainSummary

FORMAT = 1


@dataclass
class BaselineState:
    """`stage` counts what is complete: -1 before the evaluation of the untrained agent. `step` names TRL's checkpoint."""

    algorithm: str
    budget: dict[str, Any] = field(default_factory=dict)  # of the team that it stands in for
    trl: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # of GRPOConfig
    stage: int = -1
    step: int = 0
    version: dict[str, Any] = field(default_factory=dict)
    metrics_bytes: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0
    out_of_region: int = 0
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    episodes_evaluated: int = 0

    def adapter_version(self, agent: str) -> AdapterVersion:
        return AdapterVersion(agent, self.version["number"], self.version["content_hash"])


def write_state(run_dir: Path, state: BaselineState) -> None:
    write_atomic(run_dir / BASELINE, dump_json({"format": FORMAT} | asdict(state)))


def read_state(run_dir: Path) -> BaselineState | None:
    """None where no baseline has run here."""
    path = run_dir / BASELINE
    try:
        data = json.loads(path.read_text())
        if data.pop("format") != FORMAT:
            raise ValueError("written by another version of teamtr-lora")
        return BaselineState(**data)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error}); choose another --run-dir") from error


def check_folder(path: Path, recipe: Recipe, algorithm: str, *, resume: bool) -> BaselineState | None:
    """What is there to go on from; refuses a folder that holds something else before anything is loaded or written."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file; choose another --run-dir")
    state = read_state(path)
    if state is None:
        if path.is_dir() and any(not entry.name.startswith(".") for entry in path.iterdir()):
            raise UserError(f"{path}: is not empty and holds no baseline; choose another --run-dir")
        return None
    if state.stage < 0:  # it ended before anything was measured: begins anew
        return None
    if state.algorithm != algorithm:
        raise UserError(f"{path}: holds a run of {state.algorithm}, not of {algorithm}; choose another --run-dir")
    difference = first_difference(load_recipe(path / "recipe.yaml"), recipe, ignore=MAY_CHANGE)
    if difference:
        key, old, new = difference
        raise UserError(f"{path}: holds another recipe's run: {key} is {old!r} there and {new!r} here; choose another --run-dir")
    if not resume:
        raise UserError(f"{path}: already holds a run of this baseline; add --resume to go on, or choose another --run-dir")
    return state


def summary(path: Path, recipe: Recipe, state: BaselineState) -> TrainSummary:
    """What `train` says at its end. Nothing is shrunk, rejected or skipped: TRL has no gate."""
    return TrainSummary(
        run_dir=str(path),
        stages=state.stage,
        updates=state.stage,
        accepted=state.stage,
        shrunk=0,
        rejected=0,
        skipped=0,
        out_of_region_accepted=state.out_of_region,
        accuracy_before=state.accuracy_before,
        accuracy_after=state.accuracy_after,
        episodes_evaluated=state.episodes_evaluated,
        tokens=state.sampled_tokens,
        seconds=round(state.seconds, 3),
        adapters={recipe.team.agents[0].name: state.version["content_hash"]},
    )
