"""What a baseline's run is and how far it is. Written last, it is the commit point of every update."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe
from teamtr_lora.runs.run_dir import RunDir, elsewhere
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
    reward_before: float | None = None
    reward_after: float | None = None
    episodes_evaluated: int = 0

    def adapter_version(self, agent: str) -> AdapterVersion:
        return AdapterVersion.from_stored(agent, self.version)


def write_state(run_dir: RunDir, state: BaselineState) -> None:
    run_dir.write_baseline({"format": FORMAT} | asdict(state))


def read_state(run_dir: RunDir) -> BaselineState | None:
    """None where no baseline has run here."""
    data = run_dir.read_baseline()
    if data is None:
        return None
    try:
        if data.pop("format") != FORMAT:
            raise ValueError("written by another version of teamtr-lora")
        return BaselineState(**data)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run_dir.path}: its baseline cannot be read ({error}); {elsewhere()}") from error


def check_folder(path: Path, recipe: Recipe, algorithm: str, *, resume: bool) -> BaselineState | None:
    """What is there to go on from; refuses a folder that holds something else before anything is loaded or written."""
    run_dir = RunDir(path)
    run_dir.check_place()
    state = read_state(run_dir)
    if state is None:
        run_dir.check_empty("no baseline")
        return None
    if state.stage < 0:  # it ended before anything was measured: begins anew
        return None
    if state.algorithm != algorithm:
        raise UserError(f"{path}: holds a run of {state.algorithm}, not of {algorithm}; {elsewhere()}")
    run_dir.check_same(recipe)
    if not resume:
        raise UserError(f"{path}: already holds a run of this baseline; add --resume to go on, or {elsewhere()}")
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
        reward_before=state.reward_before,
        reward_after=state.reward_after,
        episodes_evaluated=state.episodes_evaluated,
        tokens=state.sampled_tokens,
        seconds=round(state.seconds, 3),
        adapters={recipe.team.agents[0].name: state.version["content_hash"]},
    )
