"""What all parts of a run work with."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate import Accelerator

from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.tasks import Task
from teamtr_lora.training.events import Events


@dataclass(frozen=True, kw_only=True)
class RunContext:
    playable: PlayableTeam
    task: Task
    config: TeamTRConfig  # a Recipe, which is one that also names base, team and task
    run_dir: RunDir
    accelerator: Accelerator
    events: Events
    process_seconds: float = 0.0  # from the start of the process until the base was asked for
    started: float | None = None  # monotonic; None: now. Lets the time that the user waited for the base to load count

    @property
    def agents(self) -> list[str]:
        return self.playable.team.names
