"""Training that ends when so many minutes and so many sampled tokens are spent, or all stages are done, and the team at both
points, and at quarters of the minutes, on held-out items.

Minutes are those of rollouts and updates: loading, evaluations and probes are not counted, nor what is measured beside TRL's own
work. Every version of an adapter is kept in the run, so the team of any moment can be played afterwards.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import cells

from teamtr_lora.base.versions import AdapterVersion, version_number
from teamtr_lora.baselines.single import single_agent_recipe
from teamtr_lora.baselines.trl_baseline import train_baseline
from teamtr_lora.common.files import dump_json, write_atomic
from teamtr_lora.common.paired import paired_test
from teamtr_lora.evaluation.evaluate import by_item, plan_in_training
from teamtr_lora.evaluation.inference import Played, SelfConsistency
from teamtr_lora.evaluation.outcome import Attempt, judge
from teamtr_lora.recipe import Recipe
from teamtr_lora.rollout.playable import load_versions, open_team
from teamtr_lora.runs.metrics import UpdateRow, has_rows, read_rows
from teamtr_lora.runs.stored_run import read_run

BESIDE = ("diagnostics", "probe")  # phases of an update that learning does not need
PARTS = {"start": 0.0, "quarter": 0.25, "half": 0.5, "three_quarters": 0.75, "minutes": 1.0}  # of the minutes
POINTS = (*PARTS, "tokens")
VOTES = 3  # an agent alone is also asked so many times, and its answers vote


@dataclass(frozen=True)
class Budget:
    minutes: float
    tokens: float
    items: int = 512  # held-out items of the evaluations
    trl: bool = False  # one agent trained by TRL's GRPO

    def work(self, variant: cells.Variant, seed: int, folder: Path, until: float) -> cells.Measures:
        """A cell's work: trains until both are spent or the stages are done, then plays the teams of these moments and the
        untrained one."""
        run = folder / "run"
        recipe = variant.recipe(seed, run)
        if not self._over(run, recipe):
            cells.told(variant, seed, run, until)
            self._train(recipe, run, until)
        if not self._over(run, recipe):
            raise cells.TimeUpError
        if any(not (folder / f"{point}.json").exists() for point in POINTS):
            cells.in_time(until)
            self._evaluate(run, folder)
        found = {point: json.loads((folder / f"{point}.json").read_text()) for point in POINTS}
        return {
            "before": found["start"]["accuracy"],
            "after": found["minutes"]["accuracy"],
            "at_tokens": found["tokens"]["accuracy"],
            "minutes": found["minutes"]["seconds"] / 60,
            "tokens": found["minutes"]["tokens"],
            "updates": found["minutes"]["updates"],
            "minutes_at_tokens": found["tokens"]["seconds"] / 60,
        }

    def _train(self, recipe: Recipe, run: Path, until: float) -> None:
        enough = cells.StopWhen(lambda: self.spent(run) or time.time() >= until)
        if self.trl:
            train_baseline(recipe, "grpo", resume=True, callbacks=[enough])
        else:
            cells.train(recipe, until, [enough])

    def _over(self, run: Path, recipe: Recipe) -> bool:
        if self.trl and len(_updates(run)) >= single_agent_recipe(recipe).training.stages:  # one update each
            return True
        return self.spent(run) or (not self.trl and cells.finished(run, recipe))

    def spent(self, run: Path) -> bool:
        used = self.used(run)
        return bool(used) and used[-1][0] >= 60 * self.minutes and used[-1][1] >= self.tokens

    def used(self, run: Path) -> list[tuple[float, int]]:
        """Seconds and sampled tokens after each update."""
        used, seconds, tokens = [], 0.0, 0
        beside = (*BESIDE, "gate") if self.trl else BESIDE
        for row in _updates(run):
            seconds += sum(value for phase, value in row.seconds.items() if phase not in beside)
            tokens += row.sampled_tokens if row.fresh_episodes else 0
            used.append((seconds, tokens))
        return used

    def _evaluate(self, run: Path, folder: Path) -> None:
        stored, used = read_run(run), self.used(run)
        recipe, rows = stored.recipe, _updates(run)
        task = recipe.task.build(recipe.folder)
        plan = plan_in_training(task, recipe, self.items)
        begun = [(0.0, 0), *used]
        whole, tokens = min(60 * self.minutes, used[-1][0]), min(self.tokens, used[-1][1])  # less where the stages ended first
        moments = {p: next(k for k, (at, _) in enumerate(begun) if at >= part * whole) for p, part in PARTS.items()}
        moments["tokens"] = next(k for k, (_, sampled) in enumerate(begun) if sampled >= tokens)
        playable = open_team(recipe.base, recipe.team, recipe.rollout, seed=recipe.seed, folder=recipe.folder)
        untrained = playable.adapter_versions()
        try:
            for point, updates in moments.items():
                load_versions(playable, untrained | versions_after(rows[:updates]), stored.adapters)
                outcomes = [judge(Attempt.of(episode), task) for episode in playable.play(task, plan)]
                right = [sum(o.success for o in own) / len(own) for own in by_item(outcomes)]
                seconds, tokens = begun[updates]
                report: dict[str, Any] = {"updates": updates, "seconds": seconds, "tokens": tokens, "accuracy": fmean(right)}
                report["own_answers"] = {a: fmean(o.verdicts.get(a) is True for o in outcomes) for a in playable.team.names}
                if len(playable.team.names) == 1:
                    chain = Played(playable, task, plan.temperature, plan.max_message_tokens, plan.purpose)
                    voted = SelfConsistency(chain, VOTES).attempts(plan.items, range(len(plan.items)), 1, None)
                    report["voted_by_item"] = [float(judge(attempt, task).success) for attempt in voted]
                    report["voted"] = fmean(report["voted_by_item"])
                write_atomic(folder / f"{point}.json", dump_json(report | {"by_item": right}))
        finally:
            playable.close()


def learning_curves(cells: Sequence[Path]) -> dict[str, list[tuple[float, float]]]:
    """By the parts of the minutes: (minutes, accuracy) of each cell that has been evaluated."""
    done = [cell for cell in cells if (cell / f"{POINTS[-1]}.json").exists()]
    found = {point: [json.loads((cell / f"{point}.json").read_text()) for cell in done] for point in PARTS if done}
    return {point: [(own["seconds"] / 60, own["accuracy"]) for own in reports] for point, reports in found.items()}


def _updates(run: Path) -> list[UpdateRow]:
    return [row for row in read_rows(run) if isinstance(row, UpdateRow)] if has_rows(run) else []


def versions_after(rows: Sequence[UpdateRow]) -> dict[str, AdapterVersion]:
    """The newest versions of the agents that these updates were of."""
    return {row.agent: AdapterVersion(row.agent, version_number(row.version), row.content_hash) for row in rows}


def paired_by_item(reference: Sequence[Path], other: Sequence[Path]) -> dict[str, Any]:
    """Differences other - reference at every point, and of the means over the parts of the minutes (`trained`), over the items of
    all seeds that both have."""
    pairs = zip(reference, other, strict=True)
    both = [pair for pair in pairs if all((cell / f"{POINTS[-1]}.json").exists() for cell in pair)]
    sides = [{point: _right(side, point) for point in POINTS} for side in zip(*both, strict=True)]
    _, *after_start = PARTS
    for right in sides:
        right["trained"] = [fmean(own) for own in zip(*(right[point] for point in after_start), strict=True)]
    found = {}
    for point in (*POINTS, "trained") if sides else ():
        test = paired_test(*(right[point] for right in sides))
        found[point] = {"difference": test.difference, "low": test.low, "high": test.high, "p_value": test.p_value}
    return found


def _right(cells: Sequence[Path], point: str) -> list[float]:
    """Of every item of every cell."""
    return [right for cell in cells for right in json.loads((cell / f"{point}.json").read_text())["by_item"]]
