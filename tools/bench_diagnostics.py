"""What the default diagnostics add to an update, as a ratio of one run: the same update with and without them, in turn.

    .venv/bin/python tools/bench_diagnostics.py [RECIPE] [section.key=value ...] [--repeats 7] [--json]

Without rollouts, which would only make the ratio smaller. `added` is the median time with diagnostics over that without, less 1,
in wall-clock and in this process's CPU seconds (on a busy machine only the latter means anything, on a GPU only the former);
`share` is the time that the diagnostics themselves took, over the update's.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from teamtr_lora.recipe import load_recipe
from teamtr_lora.rollout.collector import PlayPlan
from teamtr_lora.runs.metrics import UpdateRow
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.team import Episode
from teamtr_lora.training.events import Events
from teamtr_lora.training.rows import update_row
from teamtr_lora.training.run_context import RunContext
from teamtr_lora.training.run_diagnostics import RunDiagnostics
from teamtr_lora.training.stage_rollouts import Rollout
from teamtr_lora.training.trainer import TeamTRTrainer
from teamtr_lora.training.update import AgentUpdater

ROOT = Path(__file__).resolve().parent.parent


class Bench:
    """One agent's update, again and again from the same start."""

    def __init__(self, trainer: TeamTRTrainer, folder: Path) -> None:
        self._playable, recipe = trainer.open(), trainer.recipe
        accelerator = Accelerator(cpu=self._playable.base.device.type == "cpu")
        self._updater = AgentUpdater(self._playable, recipe, accelerator)
        context = RunContext(
            playable=self._playable,
            task=trainer.task,
            config=recipe,
            run_dir=RunDir(folder),
            accelerator=accelerator,
            events=Events([], recipe, updates=1),
        )
        self._diagnostics = RunDiagnostics(context, self._updater)
        self._agent = self._playable.team.names[-1]
        self._before = self._playable.bank.snapshot(self._agent)
        self._optimizer = copy.deepcopy(self._updater.optimizers[self._agent].state_dict())

    def update(self, episodes: list[Episode], place: int, *, on: bool) -> tuple[float, float, UpdateRow]:
        self._playable.bank.restore(self._agent, self._before)
        self._updater.optimizers[self._agent].load_state_dict(copy.deepcopy(self._optimizer))
        started, cpu = time.perf_counter(), time.process_time()
        outcome = self._updater.update(self._agent, episodes, 0)
        rollout = Rollout(episodes=episodes, versions=self._playable.versions(), seconds=1.0)
        row = update_row(outcome, rollout, stage=1, update=place)
        if on:
            self._diagnostics.fill(row, rollout, outcome)
        return time.perf_counter() - started, time.process_time() - cpu, row


def measure(trainer: TeamTRTrainer, repeats: int) -> dict[str, Any]:
    recipe = trainer.recipe
    rollout = recipe.rollout
    items = [trainer.task.items("train")[i] for i in range(rollout.items_per_stage)]
    plan = PlayPlan(
        items=items,
        episodes_per_item=rollout.episodes_per_item,
        temperature=rollout.temperature,
        max_message_tokens=rollout.max_message_tokens,
        purpose="bench",
    )
    episodes = trainer.open().play(trainer.task, plan)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(trainer, Path(folder))
        bench.update(episodes, 1, on=True)  # warms up, and begins the stage that contexts drift from
        timed = [(bench.update(episodes, 2, on=False), bench.update(episodes, 2, on=True)) for _ in range(repeats)]
    off, on = (statistics.median(pair[side][0] for pair in timed) for side in (0, 1))
    cpu_off, cpu_on = (statistics.median(pair[side][1] for pair in timed) for side in (0, 1))
    own = statistics.median(row.seconds["diagnostics"] for _, (_, _, row) in timed)
    return {
        "episodes": len(episodes),
        "repeats": repeats,
        "update_seconds": off,
        "update_seconds_with_diagnostics": on,
        "added": on / off - 1,
        "cpu_seconds": cpu_off,
        "cpu_added": cpu_on / cpu_off - 1,
        "diagnostics_seconds": own,
        "share": own / off,
        "row_bytes": len(timed[0][1][2].model_dump_json()),
        "row_bytes_without": len(timed[0][0][2].model_dump_json()),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="RECIPE | section.key=value")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_intermixed_args(arguments)
    recipes = [Path(word) for word in args.words if "=" not in word] or [ROOT / "recipes" / "quickstart.yaml"]
    trainer = TeamTRTrainer.from_recipe(load_recipe(recipes[0], [word for word in args.words if "=" in word]))
    try:
        found = measure(trainer, args.repeats)
    finally:
        trainer.close()
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print(
            f"update {found['update_seconds']:.3f} s, with diagnostics {found['update_seconds_with_diagnostics']:.3f} s: "
            f"added {found['added']:+.1%} of wall-clock, {found['cpu_added']:+.1%} of {found['cpu_seconds']:.2f} CPU seconds "
            f"(medians of {found['repeats']}, in turn); diagnostics alone "
            f"{found['diagnostics_seconds'] * 1e3:.1f} ms, {found['share']:.2%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
