"""`plan`'s wall-clock: what a recipe will take, from the speeds that another run has logged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from teamtr_lora.algorithm.variants.chosen import Variants
from teamtr_lora.base.frozen_base import resolve_device
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe
from teamtr_lora.runs.metrics import MetricsRow, StageRow, UpdateRow
from teamtr_lora.runs.stored_run import read_run
from teamtr_lora.study.shares import Share
from teamtr_lora.team import most_messages


@dataclass(frozen=True)
class Speeds:
    """Of one run. Messages are counted as the router allows them, so that teams of other sizes can be compared."""

    source: str  # in words
    rollout_seconds: float  # for a message
    update_seconds: float  # for an episode and an inner epoch: optimization, gate, publishing, diagnostics
    start_seconds: float  # loading the base and the engine
    tokens_per_message: float
    window_kept: float  # of the earlier rollouts' episodes that an update could have learned from again: the share that it did


@dataclass(frozen=True)
class ExpectedTime:
    """Seconds. `stage_seconds` is without evaluations, `run_seconds` with them and with the start."""

    source: str
    rollouts_seconds: float
    updates_seconds: float
    stage_seconds: float
    evaluation_seconds: float
    start_seconds: float
    run_seconds: float
    tokens_per_message: float


def speeds_of(rows: Sequence[MetricsRow], recipe: Recipe, source: str) -> Speeds:
    """`recipe`: of the run that logged the rows."""
    updates = [row for row in rows if isinstance(row, UpdateRow)]
    warm = updates[1:] or updates  # the first one waits for compilers and caches
    fresh = [row for row in warm if row.fresh_episodes] or [row for row in updates if row.fresh_episodes]
    learned = [row for row in warm if row.optimizer_steps] or [row for row in updates if row.optimizer_steps]
    if not fresh or not learned:
        raise UserError(f"{source}: no update was made there, so there are no speeds to take; let one train a stage")
    messages, epochs = most_messages(recipe.team), recipe.training.inner_epochs
    per_message = math.fsum(row.seconds["rollout"] for row in fresh) / sum(row.fresh_episodes * messages for row in fresh)
    worked = math.fsum(seconds for row in learned for phase, seconds in row.seconds.items() if phase != "rollout")
    first = next((row for row in rows if isinstance(row, StageRow) and row.stage == 0 and row.evaluation), None)
    played = (first.evaluation or {}).get("episodes", 0) * messages * per_message if first else 0.0
    window = Variants.of(recipe).reuse.window(len(recipe.team.agents))
    offered = window * sum(row.episodes for row in updates[window:])
    return Speeds(
        source=source,
        rollout_seconds=per_message,
        update_seconds=worked / sum((row.episodes + row.window_episodes) * epochs for row in learned),
        start_seconds=max(0.0, first.seconds - played) if first else 0.0,
        tokens_per_message=sum(row.sampled_tokens for row in fresh) / sum(row.episodes * messages for row in fresh),
        window_kept=sum(row.window_episodes for row in updates[window:]) / offered if offered else 1.0,
    )


def speeds_of_run(folder: Path, recipe: Recipe) -> Speeds:
    """Those of an earlier run of the same base on the same engine and device; other ones would say nothing about `recipe`."""
    stored = read_run(folder)
    for key, there, here in (
        ("base.source", stored.recipe.base.source, recipe.base.source),
        ("base.quantization", stored.recipe.base.quantization, recipe.base.quantization),
        ("rollout.engine", stored.recipe.rollout.engine, recipe.rollout.engine),
        ("base.device", *(resolve_device(own.base.device).type for own in (stored.recipe, recipe))),
    ):
        if there != here:
            raise UserError(f"--from {folder}: {key} is {there} there and {here} here, so speeds differ; use --calibrate")
    return speeds_of(stored.rows(), stored.recipe, f"the speeds of {folder}")


def expected_time(
    speeds: Speeds, recipe: Recipe, *, rollouts: int, episodes: int, messages: int, share: Share | None = None
) -> ExpectedTime:
    """`rollouts` of a stage, each of `episodes` with at most `messages`. `share` of the busiest of several processes, each as
    fast as the one that was measured; what they send each other is not counted."""
    rolling, updating = (share.rollout_work, share.update_work) if share else (1.0, 1.0)
    rolled = rolling * speeds.rollout_seconds * rollouts * episodes * messages
    agents = len(recipe.team.agents)
    window = speeds.window_kept * Variants.of(recipe).reuse.window(agents)
    handled = episodes * (1 + window)  # the newest ones, and those that are used again
    updated = updating * speeds.update_seconds * agents * handled * recipe.training.inner_epochs
    section, stages = recipe.evaluation, recipe.training.stages
    played = math.ceil(section.items / share.processes) if share else section.items
    evaluation = speeds.rollout_seconds * messages * played * section.samples_in_training
    after = [stage for stage in range(1, stages + 1) if section.due(stage, stages)]
    stage = rolled + updated
    return ExpectedTime(
        source=speeds.source,
        rollouts_seconds=rolled,
        updates_seconds=updated,
        stage_seconds=stage,
        evaluation_seconds=evaluation,
        start_seconds=speeds.start_seconds,
        run_seconds=speeds.start_seconds + stages * stage + (1 + len(after)) * evaluation,
        tokens_per_message=speeds.tokens_per_message,
    )
