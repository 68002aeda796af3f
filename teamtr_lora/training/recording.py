"""What a run writes down: rows for metrics.jsonl, callbacks and trackers, transcripts, and the running counts."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from teamtr_lora.algorithm.occupancy import weight_degeneracy
from teamtr_lora.base.memory import peak_memory
from teamtr_lora.runs.metrics import StageRow, UpdateRow
from teamtr_lora.runs.run_state import RunState
from teamtr_lora.training.certificate_terms import certificate_terms
from teamtr_lora.training.rows import update_row
from teamtr_lora.training.run_context import RunContext
from teamtr_lora.training.run_diagnostics import RunDiagnostics
from teamtr_lora.training.stage_rollouts import Rollout
from teamtr_lora.training.token_marks import episode_marks
from teamtr_lora.training.tracking import log_transcripts, stage_scalars, update_scalars
from teamtr_lora.training.update import UpdateOutcome


class Recorder:
    def __init__(self, context: RunContext, diagnostics: RunDiagnostics, discount: float) -> None:
        self._context, self._diagnostics, self._discount = context, diagnostics, discount
        self._ranks = context.playable.ranks

    def update(self, state: RunState, stage: int, place: int, rollout: Rollout, outcome: UpdateOutcome) -> None:
        """One update: its row, its episodes, and `state` moved on to the next update."""
        row = update_row(outcome, rollout, stage=stage, update=place + 1)
        if outcome.accepted_reading is not None and outcome.judging is not None:
            row.certificate = certificate_terms(
                outcome.accepted_reading, outcome.judging, rollout.episodes, config=self._context.config, gamma=self._discount
            )
        if len(log_weight_E := outcome.material.reused_episode_log_weights()):
            row.importance = asdict(weight_degeneracy(log_weight_E))
        self._diagnostics.fill(row, rollout, outcome)
        row.idle_share = self._ranks.idle_share()
        counts = state.counts
        counts["updates"] += 1
        counts["accepted"] += outcome.accepted
        counts["out_of_region_accepted"] += row.out_of_region
        for kind in ("shrunk", "rejected", "skipped"):
            counts[kind] += outcome.decision == kind
        state.idle_updates = state.idle_updates + 1 if outcome.decision == "skipped" else 0
        state.update = place + 1
        if rollout.fresh:
            state.sampled_tokens += row.sampled_tokens
            name = f"stage-{stage:04d}-update-{place + 1}-{row.agent}"
            started = time.monotonic()
            self._write_episodes(name, rollout, outcome)
            row.seconds["transcripts"] = time.monotonic() - started
        self._context.events.state.global_step = counts["updates"]
        scalars = update_scalars(row, self._context.config.trust_region.estimator)
        self._write(row, scalars, counts["updates"])
        if place + 1 == len(self._context.agents):
            accelerator, step = self._context.accelerator, counts["updates"]
            log_transcripts(accelerator, rollout.episodes, stage=stage, agent=row.agent, step=step)
        self._context.events.fire("on_step_end")

    def _write_episodes(self, name: str, rollout: Rollout, outcome: UpdateOutcome) -> None:
        if not self._ranks.first:
            return
        keep, reduction = self._context.config.diagnostics.save_episodes, self._context.config.trust_region.reduction
        tokenizer = self._context.playable.base.tokenizer
        marks = None if keep == "none" else episode_marks(rollout.episodes, outcome, tokenizer, reduction=reduction)
        self._context.run_dir.write_episodes(name, rollout.episodes, keep, marks)

    def stage(
        self,
        state: RunState,
        stage: int,
        seconds: float,
        *,
        order: list[str],
        evaluation: dict[str, Any] | None,
        floors: dict[str, float] | None = None,
        start_seconds: dict[str, float] | None = None,
    ) -> None:
        """`seconds` since the last checkpoint, which `state` has not counted yet."""
        counts: dict[str, Any] = dict(state.counts)
        row = StageRow(
            stage=stage,
            order=order,
            versions=self._context.playable.versions(),
            evaluation=evaluation,
            floors=floors,
            start_seconds=start_seconds,
            items_seen=state.cursor,
            **counts,
            sampled_tokens=state.sampled_tokens,
            seconds=state.seconds + seconds,
            peak_memory_bytes=peak_memory(self._context.playable.base.device),
            time=time.time(),
        )
        self._write(row, stage_scalars(row), state.counts["updates"])

    def _write(self, row: UpdateRow | StageRow, scalars: dict[str, float], step: int) -> None:
        if not self._ranks.first:
            return
        self._context.run_dir.metrics.append(row)
        self._context.events.log(row.model_dump())
        self._context.accelerator.log(scalars, step=step)
