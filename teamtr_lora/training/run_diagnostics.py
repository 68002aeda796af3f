"""What a run measures about itself: the numbers every update has anyway, and probes where the recipe asks for them.

Nothing here changes what is learned: samples come from seeds of their own, and adapters are put back bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.rollout.playable import PlayableTeam, versions_in_place
from teamtr_lora.rollout.sampler import derive_seed
from teamtr_lora.runs.diagnostic_rows import ProbeReading
from teamtr_lora.runs.metrics import UpdateRow
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.runs.run_state import RunState
from teamtr_lora.tasks import Item, Task
from teamtr_lora.team import Episode
from teamtr_lora.training.staleness_probe import StageProbe, probe_plan
from teamtr_lora.training.update import AgentUpdater, UpdateOutcome
from teamtr_lora.training.update_diagnostics import StageContexts, contexts, shift_between, update_diagnostics


class RunDiagnostics:
    def __init__(self, playable: PlayableTeam, task: Task, config: TeamTRConfig, run_dir: RunDir, updater: AgentUpdater) -> None:
        self._playable, self._task, self._config, self._run_dir, self._updater = playable, task, config, run_dir, updater
        self._contexts = StageContexts(run_dir.stage_contexts)
        self._probe: StageProbe | None = None
        self._reading: ProbeReading | None = None
        self._probe_seconds = 0.0

    def begin_stage(self, state: RunState, stage: int) -> None:
        self._probe = None
        if state.update:  # resumed within the stage: it began with another team
            return
        state.stage_versions = self._playable.adapter_versions()
        section = self._config.diagnostics
        due = section.probe_every_stages > 0 and stage % section.probe_every_stages == 0
        state.probing = due and (section.probe_share is None or state.probe_seconds <= section.probe_share * state.seconds)

    def before_update(self, state: RunState, agent: str, stage: int, update: int, items: Callable[[], list[Item]]) -> None:
        """In a stage that is probed: plays the team that the update is about to change."""
        self._reading, self._probe_seconds = None, 0.0
        if not state.probing:
            return
        started = time.monotonic()
        if self._probe is None:
            self._probe = self._open_probe(state, stage, items())
        self._probe.before_update(agent, update)
        self._probe_seconds = time.monotonic() - started

    def _open_probe(self, state: RunState, stage: int, items: list[Item]) -> StageProbe:
        plan = probe_plan(self._config, items, stage)
        adapters = self._run_dir.adapters
        versions = state.stage_versions
        with versions_in_place(self._playable, versions, adapters) if state.update else nullcontext():
            start = self._playable.play(self._task, plan)
        updater = self._updater
        return StageProbe(
            self._playable, self._task, self._config, updater.scorer, adapters, plan, versions, start, updater.discount
        )

    def after_update(self, state: RunState, agent: str, stage: int, outcome: UpdateOutcome) -> None:
        """Call where forward passes may run."""
        if self._probe is None:
            return
        started = time.monotonic()
        self._reading = self._probe.after_update(agent, outcome, self._seed(stage, agent))
        self._probe_seconds += time.monotonic() - started
        state.probe_seconds += self._probe_seconds

    def fill(self, row: UpdateRow, episodes: list[Episode], outcome: UpdateOutcome, *, fresh: bool) -> None:
        """The row's fields `diagnostics` and `probe`."""
        started = time.monotonic()
        row.probe = self._reading
        if self._reading is not None:
            row.seconds["probe"] = self._probe_seconds
        if not self._config.diagnostics.from_updates:
            return
        shown = outcome.step.shown
        seed, shift = self._seed(row.stage, row.agent), None
        if fresh:
            own = contexts(episodes, self._task)
            if row.update == 1:
                self._contexts.begin(row.stage, own)
            else:
                first = self._contexts.of(row.stage)
                shift = None if first is None else shift_between(first, own, seed)
        row.diagnostics = update_diagnostics(
            outcome.readings[shown.alpha] if shown else None,
            outcome.delta,
            reduction=self._config.trust_region.reduction,
            shift=shift,
            seed=seed,
        )
        row.seconds["diagnostics"] = time.monotonic() - started

    def _seed(self, stage: int, agent: str) -> int:
        return derive_seed(self._config.seed, "diagnostics", stage, agent)
