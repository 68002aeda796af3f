"""How much of a step is signal? Variants of an update from the same start, read on episodes that none of them has seen.

    .venv/bin/python tools/step_lab.py recipes/quickstart.yaml --agent solver rollout.items_per_stage=64
        [--vary "sgd: training.optimizer=sgd training.initial_learning_rate=0.1" --vary "narrow: lora.rank=1 lora.alpha=2" ...]
        [--judge 256] [--kl 0.02] [--repeats 2] [--steps 8] [--out FILE.json]

One untrained team plays --judge items that judge everything, and the items that are learned from: rollout.items_per_stage for
each step. Inside a trust region a step's length is given, and what counts is its direction: so every variant's step is brought to
the KL --kl, by scaling the adapter's change, and read there. `gain` is what the expected reward gains by it, in units of the
reward, with its standard error over items; `worth` is that over the square root of twice the KL, which does not depend on the
length as long as steps are short. Noise gains nothing and costs KL, so it takes away from it. Repeats learn from other items.

With --steps K each variant then also makes K updates in a row, each on items of its own, with the learning rate that gave its
first one the KL --kl: rows `NAME x K`, read against the start. The episodes stay those of the untrained team, so this is training
as long as the team has hardly moved (see `kl`). Variants change keys of training, and rank, alpha and targets of an adapter of
their own (lora.KEY). Nothing is published and nothing is kept.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from teamtr_lora.algorithm.advantage import message_discount
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json, write_atomic
from teamtr_lora.recipe import LoraSection, Recipe, load_recipe
from teamtr_lora.rollout.collector import PlayPlan
from teamtr_lora.rollout.playable import PlayableTeam, open_team
from teamtr_lora.tasks import DataOrder
from teamtr_lora.team import Episode, agent_sequences
from teamtr_lora.training.batches import MessageBatch
from teamtr_lora.training.gate import CandidateReading, gate_pass, read_candidate
from teamtr_lora.training.scoring import CurrentPolicy, Scorer, keep_current
from teamtr_lora.training.update import AgentUpdater, episode_advantages
from teamtr_lora.training.window import Material, PlayedEpisodes

ALWAYS = ("training.reuse=none", "trust_region.kind=none")  # steps are taken whole
COLUMNS = ("gain", "error", "worth", "kl", "learning_rate", "seconds")
FOR_LENGTH = 64  # judging messages that say how long a step is


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="RECIPE | section.key=value")
    parser.add_argument("--agent", help="whose update (default: the first agent's)")
    parser.add_argument("--vary", action="append", default=[], metavar='"NAME: key=value ..."', help="beside the recipe as it is")
    parser.add_argument("--judge", type=int, default=256, help="items that judge")
    parser.add_argument("--kl", type=float, default=0.02, help="nats a message that a step is brought to")
    parser.add_argument("--repeats", type=int, default=2, help="steps of each variant, on other items")
    parser.add_argument("--steps", type=int, default=0, help="updates in a row that each variant makes beside these")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_intermixed_args(arguments)
    try:
        print_table(measure(args))
    except UserError as error:
        print(f"step_lab: {error}", file=sys.stderr)
        return 2
    return 0


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    files = [Path(word) for word in args.words if "=" not in word]
    common = [word for word in args.words if "=" in word] + list(ALWAYS)
    variants = {"as it is": []} | {name: words.split() for name, _, words in (each.partition(": ") for each in args.vary)}
    recipes, adapters = {}, {}
    recipe = load_recipe(files, common)
    # others judge them here, so that all but two items of a step are learned from
    common.append(f"trust_region.holdout={2 / recipe.rollout.items_per_stage}")
    recipe = load_recipe(files, common)
    agent = args.agent or recipe.team.agents[0].name
    own = next((each.lora for each in recipe.team.agents if each.name == agent), None)
    if own is None:
        raise UserError(f"--agent {agent}: the agents are {', '.join(each.name for each in recipe.team.agents)}")
    for name, words in variants.items():
        changed = [word.removeprefix("lora.").split("=", 1) for word in words if word.startswith("lora.")]
        adapters[name] = LoraSection.model_validate(own.model_dump() | {key: json.loads(value) for key, value in changed})
        recipes[name] = load_recipe(files, [*common, *(word for word in words if not word.startswith("lora."))])
    playable = open_team(
        recipe.base, recipe.team, recipe.rollout, seed=recipe.seed, folder=recipe.folder,
        extra={f"variant-{place}": lora for place, lora in enumerate(adapters.values())},
    )  # fmt: skip
    try:
        lab = Lab(args, playable, recipe, agent)
        names = {name: f"variant-{place}" for place, name in enumerate(recipes)}
        playable.team = replace(playable.team, names=[*playable.team.names, *names.values()])
        for name, adapter in names.items():
            lab.try_out(name, recipes[name], adapter)
        return lab.found
    finally:
        playable.close()


class Lab:
    """One untrained team's episodes, and what updates from them are worth."""

    def __init__(self, args: argparse.Namespace, playable: PlayableTeam, recipe: Recipe, agent: str) -> None:
        self._args, self._playable, self._config, self._agent = args, playable, recipe, agent
        self.found: dict[str, list[dict[str, float]]] = {}
        task, group = recipe.task.build(recipe.folder), recipe.rollout.episodes_per_item
        split, wanted = task.items("train"), args.judge + recipe.rollout.items_per_stage * max(args.repeats, args.steps)
        if split.size is not None and split.size < wanted:
            raise UserError(
                f"{wanted} items are to judge and to be learned from, and there are {split.size}: see --judge, --steps"
            )
        items = DataOrder(split, recipe.seed).take(0, wanted)
        self._episodes = playable.play(task, PlayPlan.of(recipe.rollout, items, f"{recipe.seed}/step lab"))
        first, size = args.judge * group, recipe.rollout.items_per_stage * group
        self._lots = [self._episodes[at : at + size] for at in range(first, len(self._episodes), size)]
        playable.bank.activate(agent)
        scorer, judging = AgentUpdater(playable, recipe).scorer, self._episodes[:first]
        # untrained adapters change nothing, so that this is every variant's policy before its first step
        self._all = self._kept(scorer, judging)
        self._few = self._kept(scorer, judging[::group][:FOR_LENGTH])

    def _kept(self, scorer: Scorer, episodes: list[Episode]) -> tuple[MessageBatch, CurrentPolicy]:
        """The agent's messages with what they earned beside the others of their group, and the untrained policy there."""
        discount = message_discount(self._config.training.discount, self._playable.team.router.max_messages)
        earned = self._config.training.model_copy(update={"advantage": "leave_one_out"})
        advantages = episode_advantages(episodes, self._agent, earned, discount).clipped_E.tolist()
        sequences = agent_sequences(episodes, self._agent)
        batch = scorer.batch(sequences, advantages, segments=scorer.has_tf32 and scorer.quick)
        with self._playable.training_memory(), gate_pass(scorer, tf32=scorer.has_tf32):
            return batch, keep_current(scorer, batch)

    def try_out(self, name: str, recipe: Recipe, adapter: str) -> None:
        """Single steps of `name` in its `adapter`, one from each lot; then the steps in a row, from the start again."""
        bank, rates = self._playable.bank, []
        start = bank.snapshot(adapter)
        for lot in self._lots[: self._args.repeats]:
            updater, began = AgentUpdater(self._playable, recipe), time.monotonic()
            rate = self._step(updater, adapter, lot)
            whole, alpha = bank.snapshot(adapter), 1.0
            for _ in range(2):  # by the square law, which is exact for short steps alone
                kl = self._read(updater, adapter, self._few).message_sum_kl
                alpha *= math.sqrt(self._args.kl / max(kl, 1e-6 * self._args.kl))
                bank.interpolate(adapter, start, whole, alpha)
            rates.append(rate * alpha)
            self._note(name, self._read(updater, adapter, self._all), rates[-1], began)
            bank.restore(adapter, start)
        if self._args.steps:
            rate, began = statistics.fmean(rates), time.monotonic()
            fixed = recipe.training.model_copy(update={"learning_rate": rate, "schedule": "constant"})
            updater = AgentUpdater(self._playable, recipe.model_copy(update={"training": fixed}))
            for lot in self._lots[: self._args.steps]:
                self._step(updater, adapter, lot)
            self._note(f"{name} x {self._args.steps}", self._read(updater, adapter, self._all), rate, began)
            bank.restore(adapter, start)

    def _step(self, updater: AgentUpdater, adapter: str, lot: list[Episode]) -> float:
        """One update, taken whole; returns the learning rate."""
        own = Material(newest=PlayedEpisodes(_spoken_by(lot, self._agent, adapter)))
        with self._playable.training_memory():
            outcome = updater.update(adapter, own, 0)
        if not outcome.accepted:
            raise UserError(f"{adapter} took no step ({outcome.decision}): give more items, or a smaller learning rate")
        return outcome.optimized.learning_rate

    def _read(self, updater: AgentUpdater, adapter: str, kept: tuple[MessageBatch, CurrentPolicy]) -> CandidateReading:
        scorer = updater.scorer
        self._playable.bank.activate(adapter)
        with self._playable.training_memory(), gate_pass(scorer, tf32=scorer.has_tf32):
            return read_candidate(scorer, *kept, self._config, updater.discount)

    def _note(self, name: str, read: CandidateReading, rate: float, began: float) -> None:
        gain, kl = read.gain, read.message_sum_kl
        measured = (gain.mean, gain.standard_error, gain.mean / math.sqrt(2 * kl), kl, rate, time.monotonic() - began)
        row = dict(zip(COLUMNS, measured, strict=True))
        self.found.setdefault(name, []).append(row)
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in row.items()), file=sys.stderr, flush=True)
        if self._args.out:
            report = {"agent": self._agent, "episodes": len(self._episodes), "updates": self.found}
            write_atomic(self._args.out, dump_json(report))


def _spoken_by(episodes: list[Episode], agent: str, adapter: str) -> list[Episode]:
    """The same episodes with the agent's messages as the adapter's; a new adapter changes nothing, so they are its own."""

    def renamed(episode: Episode) -> Episode:
        messages = [replace(m, agent=adapter) if m.agent == agent else m for m in episode.messages]
        credit = {adapter if name == agent else name: earned for name, earned in episode.credit.items()}
        return replace(episode, messages=messages, credit=credit)

    return [renamed(episode) for episode in episodes]


def print_table(found: dict[str, list[dict[str, Any]]]) -> None:
    """Means over repeats. They share the episodes that judge them, so the error stays that of one."""
    wide = max(map(len, found))
    print(f"{'variant':{wide}}  {'  '.join(f'{name:>14}' for name in COLUMNS)}")
    for name, rows in found.items():
        means = [f"{statistics.fmean(row[column] for row in rows):14.4g}" for column in COLUMNS]
        print(f"{name:{wide}}  {'  '.join(means)}")


if __name__ == "__main__":
    sys.exit(main())
