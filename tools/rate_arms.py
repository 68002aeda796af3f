"""Learning rates beside each other in one run: a team of agents that do not hear each other, each with a rate of its own.

    .venv/bin/python tools/rate_arms.py recipes/bases/qwen3_1.7b.yaml recipes/tasks/gsm8k.yaml --out DIR
        --rates 4e-5,8e-5,1.6e-4,3.2e-4 [--items 512] [section.key=value ...]

The recipe's first agent stands once for each rate, answers every item without the others and learns from its own answers alone:
as many runs of one agent as there are rates, on the same items, at the price of one engine. The recipe's schedule is everyone's,
and its radius holds: give one that the largest rate does not leave (trust_region.delta). Printed, and written to DIR/arms.json:
how often each one's answers were right in training, by quarters of the stages, and on held-out items before, half-way and at the
end; the mean KL of what was accepted by quarters, 0 where nothing was; and the end's difference from the first rate's, item by
item. The arms are told their names, and nothing else apart. A run that was broken off goes on; the stage in which that was is
left out of what was right in training.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from budgets import versions_after
from cells import columns, in_words
from transformers.trainer_callback import TrainerCallback

from teamtr_lora.cli.arguments import positive
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json, write_atomic
from teamtr_lora.common.paired import paired_test
from teamtr_lora.evaluation.evaluate import by_item, plan_in_training
from teamtr_lora.evaluation.outcome import Attempt, judge
from teamtr_lora.recipe import Recipe, load_recipe
from teamtr_lora.rollout.playable import load_versions
from teamtr_lora.runs.metrics import UpdateRow, read_rows
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.training.trainer import TeamTRTrainer

APART = (  # nothing that one agent does changes what another learns from, so that one rollout a stage is everyone's
    "team.router.kind=debate", "team.router.rounds=1", "team.router.answer=majority", "team.router.judge=null",
    "team.router.sequence=[]", "team.own_answer_share=1", "team.recombine=false", "training.resampling=never",
    "training.update=sequential", "training.reuse=none", "training.order=random", "trust_region.step=shrink",
)  # fmt: skip
QUARTERS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="RECIPE | section.key=value")
    parser.add_argument("--rates", required=True, metavar="RATE,RATE,...")
    parser.add_argument("--items", type=positive, default=512, help="held-out items")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_intermixed_args(arguments)
    try:
        rates = [float(word) for word in args.rates.split(",")]
        if len(rates) < 2 or not all(0 < rate < math.inf for rate in rates):
            raise UserError("--rates: give two or more positive numbers")
        report = measure(recipe_of_arms(args.words, rates, args.out / "run"), rates, args.items, args.out)
    except (UserError, ValueError) as error:
        print(f"rate_arms: {error}", file=sys.stderr)
        return 2
    print(shown(report))
    return 0


def recipe_of_arms(words: Sequence[str], rates: Sequence[float], run: Path) -> Recipe:
    files = [Path(word) for word in words if "=" not in word]
    overrides = [*(word for word in words if "=" in word), f"training.learning_rate={rates[0]}", f"output_dir={run}"]
    first = load_recipe(files, overrides).team.agents[0].model_dump(mode="json", exclude_unset=True)
    agents = json.dumps([first | {"name": f"arm-{number}"} for number in range(1, len(rates) + 1)])
    return load_recipe(files, [*overrides, f"team.agents={agents}", *APART])


class Rates(TrainerCallback):  # type: ignore[misc]
    """Before each stage every agent is given its rate of that stage, and after it its success in the stage is noted."""

    def __init__(self, trainer: TeamTRTrainer, rates: Sequence[float], notes: Path) -> None:
        self._trainer, self._rates, self._notes = trainer, rates, notes

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        run = self._trainer.run
        assert run is not None
        training, dials = run.config.training, run.updater.dials
        share = training.rate_in(run.state.stage + 1) / training.starting_rate
        for agent, rate in zip(run.agents, self._rates, strict=True):
            dials[agent] = replace(dials[agent], rate=rate * share)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        run = self._trainer.run
        assert run is not None
        if not run._last_played or run._last_played[0].item is None:  # begun before an interruption: items are not stored
            return
        outcomes = [judge(Attempt.of(episode), run.task) for episode in run._last_played]
        right = {agent: fmean(o.verdicts.get(agent) is True for o in outcomes) for agent in run.agents}
        with open(self._notes, "a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": run.state.stage, "right": right}) + "\n")


def measure(recipe: Recipe, rates: Sequence[float], items: int, out: Path) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    run, notes = out / "run", out / "stages.jsonl"
    RunDir(run).check(recipe, resume=True)
    check_rates(out / "rates.json", rates)
    trainer = TeamTRTrainer.from_recipe(recipe)
    try:
        trainer.add_callback(Rates(trainer, rates, notes))
        untrained = trainer.open().adapter_versions()
        held_out = [answers(trainer, items)]
        trainer.train(resume=True)
        rows = [row for row in read_rows(run) if isinstance(row, UpdateRow)]
        for part in (0.5, 1.0):
            versions = untrained | versions_after([row for row in rows if row.stage <= part * recipe.training.stages])
            load_versions(trainer.open(), versions, RunDir(run).adapters)
            held_out.append(answers(trainer, items))
    finally:
        trainer.close()
    noted = notes.read_text().splitlines() if notes.exists() else []
    stages = {each["stage"]: each["right"] for each in map(json.loads, noted)}
    end = held_out[-1]
    first = end[recipe.team.agents[0].name]
    report: dict[str, Any] = {"stages": len(stages), "items": len(first), "arms": {}}
    for rate, agent in zip(rates, (each.name for each in recipe.team.agents), strict=True):
        own = [row for row in rows if row.agent == agent]
        kls = [row.kl["exact"].mean if row.alpha is not None else 0.0 for row in own]
        test = paired_test(first, end[agent])
        report["arms"][agent] = {
            "rate": rate,
            "held_out": [fmean(right[agent]) for right in held_out],
            "less_first": {"difference": test.difference, "low": test.low, "high": test.high},
            "in_training": by_quarter([stages[stage][agent] for stage in sorted(stages)]),
            "kl": by_quarter(kls),
            "shortened": sum(row.alpha is not None and row.alpha < 1 for row in own),
            "refused": sum(row.decision == "rejected" for row in own),
        }
    write_atomic(out / "arms.json", dump_json(report))
    return report


def check_rates(file: Path, rates: Sequence[float]) -> None:
    """The recipe does not say them, so that a run goes on with those that it began with."""
    if file.exists() and (begun := json.loads(file.read_text())) != list(rates):
        raise UserError(
            f"{file.parent} holds a run with the rates {', '.join(f'{rate:g}' for rate in begun)}: choose another --out"
        )
    write_atomic(file, dump_json(list(rates)))


def answers(trainer: TeamTRTrainer, items: int) -> dict[str, list[float]]:
    """How often each agent's own answers are right, by held-out item."""
    playable, task = trainer.open(), trainer.task
    outcomes = [judge(Attempt.of(e), task) for e in playable.play(task, plan_in_training(task, trainer.recipe, items))]
    if any(verdict is None for outcome in outcomes for verdict in outcome.verdicts.values()):
        raise UserError("this task cannot judge single messages, so that agents cannot be compared by their own answers")
    return {agent: [fmean(o.verdicts[agent] is True for o in own) for own in by_item(outcomes)] for agent in playable.team.names}


def by_quarter(values: Sequence[float]) -> list[float]:
    cuts = [round(len(values) * part / QUARTERS) for part in range(QUARTERS + 1)]
    return [fmean(values[a:b]) for a, b in zip(cuts, cuts[1:], strict=False) if b > a]


def shown(report: dict[str, Any]) -> str:
    head = ["rate", "held out: start, half, end", "less the first", "right in training", "KL", "shortened", "refused"]
    rows = [head]
    for own in report["arms"].values():
        numbers = [", ".join(f"{value:.3f}" for value in own[name]) for name in ("held_out", "in_training")]
        kl = ", ".join(f"{value:.2g}" for value in own["kl"])
        less = in_words(own["less_first"])
        rows.append([f"{own['rate']:g}", numbers[0], less, numbers[1], kl, f"{own['shortened']}", f"{own['refused']}"])
    return "\n".join(columns(rows))


if __name__ == "__main__":
    raise SystemExit(main())
