"""What a run measures about itself: the numbers every update has anyway, and probes where the recipe asks for them.

Nothing here changes what is learned: samples come from seeds of their own, and adapters are put back bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

from teamtr_lora.rollout.playable import versions_in_place
from teamtr_lora.rollout.sampler import derive_seed
from teamtr_lora.runs.diagnostic_rows import ProbeReading
from teamtr_lora.runs.metrics import UpdateRow
from teamtr_lora.runs.run_state import RunState
from teamtr_lora.tasks import Item
from teamtr_lora.training.run_context import RunContext
from teamtr_lora.training.stage_rollouts import Rollout
from teamtr_lora.training.staleness_probe import StageProbe, probe_plan
from teamtr_lora.training.update import AgentUpdater, UpdateOutcome
from teamtr_lora.training.update_diagnostics import StageContexts, contexts, shift_between, update_diagnostics


class RunDiagnostics:
    def __init__(self, context: RunContext, updater: AgentUpdater) -> None:
        self._context, self._config, self._updater = context, context.config, updater
        self._contexts = StageContexts(context.run_dir.stage_contexts, writes=context.playable.ranks.first)
        self._probe: StageProbe | None = None
        self._reading: ProbeReading | None = None
        self._probe_seconds = 0.0

    def begin_stage(self, state: RunState, stage: int) -> None:
        self._probe = None
        if state.update:  # resumed within the stage, which another team has begun
            return
        state.stage_versions = self._context.playable.adapter_versions()
        section = self._config.diagnostics
        due = section.probe_every_stages > 0 and stage % section.probe_every_stages == 0
        afford = section.probe_share is None or state.probe_seconds <= section.probe_share * state.seconds
        state.probing = self._context.playable.ranks.broadcast(due and afford)  # clocks differ

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
        context, adapters = self._context, self._context.run_dir.adapters
        with versions_in_place(context.playable, state.stage_versions, adapters) if state.update else nullcontext():
            start = context.playable.play(context.task, plan)
        return StageProbe(context, self._updater, plan, state.stage_versions, start)

    def after_update(self, state: RunState, agent: str, stage: int, outcome: UpdateOutcome) -> None:
        """Measures the update in a probed stage. Call where forward passes may run."""
        if self._probe is None:
            return
        started = time.monotonic()
        self._reading = self._probe.after_update(agent, outcome, self._seed(stage, agent))
        self._probe_seconds += time.monotonic() - started
        state.probe_seconds += self._probe_seconds

    def fill(self, row: UpdateRow, rollout: Rollout, outcome: UpdateOutcome) -> None:
        """The row's fields `diagnostics` and `probe`."""
        started = time.monotonic()
        row.probe = self._reading
        if self._reading is not None:
            row.seconds["probe"] = self._probe_seconds
        if not self._config.diagnostics.from_updates:
            return
        seed, shift = self._seed(row.stage, row.agent), None
        if rollout.fresh:
            own = contexts(rollout.episodes, self._context.task, self._context.playable.team.router.round_messages)
            if row.update == 1:
                self._contexts.begin(row.stage, own)
            else:
                first = self._contexts.of(row.stage)
                shift = None if first is None else shift_between(first, own, seed)
        row.diagnostics = update_diagnostics(
            outcome.shown, outcome.delta, reduction=self._config.trust_region.reduction, shift=shift, seed=seed
        )
        row.seconds["diagnostics"] = time.monotonic() - started

    def _seed(self, stage: int, agent: str) -> int:
        return derive_seed(self._config.seed, "diagnostics", stage, agent)
