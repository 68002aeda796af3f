"""How much of a step is signal? One rollout; one update by each variant from the same start, read on held-out episodes.

    .venv/bin/python tools/step_lab.py recipes/quickstart.yaml --agent solver rollout.items_per_stage=64
        [--vary "sgd: training.optimizer=sgd" --vary "narrow: lora.rank=1 lora.alpha=2" ...] [--repeats 3] [--out FILE.json]

Inside a trust region a step's length is given, and what counts is its direction. `worth` is the gain of the surrogate on held-out
episodes over the square root of twice the KL there: what a variant makes of its radius, whatever that is. Noise gains nothing and
costs KL, so it takes away from `worth`; a KL in-sample that is far above the held-out one is a step that has learned its episodes
by heart. Half of the groups are held out, all of them judge; each repeat divides them anew. Variants change keys of training and
trust_region, and rank, alpha and targets of an adapter of their own (lora.KEY). Nothing is published and nothing is kept.
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

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json, write_atomic
from teamtr_lora.recipe import LoraSection, Recipe, load_recipe
from teamtr_lora.rollout.collector import PlayPlan
from teamtr_lora.rollout.playable import PlayableTeam, open_team
from teamtr_lora.tasks import DataOrder
from teamtr_lora.team import Episode
from teamtr_lora.training.update import AgentUpdater
from teamtr_lora.training.window import Material, PlayedEpisodes

ALWAYS = ("training.reuse=none", "trust_region.gain=none", "trust_region.holdout=0.5", "trust_region.judging_episodes=100000")
COLUMNS = ("worth", "error", "gain", "kl", "kl_in_sample", "gain_in_sample", "alpha", "learning_rate", "seconds")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="RECIPE | section.key=value")
    parser.add_argument("--agent", help="whose update (default: the first agent's)")
    parser.add_argument("--vary", action="append", default=[], metavar='"NAME: key=value ..."', help="beside the recipe as it is")
    parser.add_argument("--repeats", type=int, default=3, help="updates of each variant")
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
        return _measured(args, playable, recipe, recipes, agent)
    finally:
        playable.close()


def _measured(
    args: argparse.Namespace, playable: PlayableTeam, recipe: Recipe, recipes: dict[str, Recipe], agent: str
) -> dict[str, list[dict[str, float]]]:
    task = recipe.task.build(recipe.folder)
    plan = PlayPlan(
        DataOrder(task.items("train"), recipe.seed).take(0, recipe.rollout.items_per_stage),
        episodes_per_item=recipe.rollout.episodes_per_item,
        temperature=recipe.rollout.temperature,
        max_message_tokens=recipe.rollout.max_message_tokens,
        purpose=f"{recipe.seed}/step lab",
    )
    episodes = playable.play(task, plan)
    adapters = {name: f"variant-{place}" for place, name in enumerate(recipes)}
    playable.team = replace(playable.team, names=[*playable.team.names, *adapters.values()])
    found: dict[str, list[dict[str, float]]] = {name: [] for name in recipes}
    for repeat in range(args.repeats):
        for name, adapter in adapters.items():
            found[name].append(_one_update(playable, recipes[name], adapter, _spoken_by(episodes, agent, adapter), repeat))
            if args.out:
                write_atomic(args.out, dump_json({"agent": agent, "episodes": len(episodes), "updates": found}))
    return found


def _spoken_by(episodes: list[Episode], agent: str, adapter: str) -> list[Episode]:
    """The same episodes with the agent's messages as the adapter's; a new adapter changes nothing, so they are its own."""

    def renamed(episode: Episode) -> Episode:
        messages = [replace(m, agent=adapter) if m.agent == agent else m for m in episode.messages]
        credit = {adapter if name == agent else name: earned for name, earned in episode.credit.items()}
        return replace(episode, messages=messages, credit=credit)

    return [renamed(episode) for episode in episodes]


def _one_update(playable: PlayableTeam, recipe: Recipe, adapter: str, episodes: list[Episode], repeat: int) -> dict[str, float]:
    started, before = time.monotonic(), playable.bank.snapshot(adapter)
    with playable.training_memory():
        outcome = AgentUpdater(playable, recipe).update(adapter, Material(newest=PlayedEpisodes(episodes)), repeat)
    playable.bank.restore(adapter, before)
    reading = outcome.kept
    if reading is None:
        return {"rejected": 1.0, "seconds": time.monotonic() - started}
    length = math.sqrt(2 * max(reading.message_sum_kl, 1e-12))
    return {
        "worth": reading.gain.mean / length,
        "error": reading.gain.standard_error / length,
        "gain": reading.gain.mean,
        "kl": reading.message_sum_kl,
        "kl_in_sample": outcome.optimized.kl,
        "gain_in_sample": outcome.optimized.gain or 0.0,
        "alpha": outcome.step.accepted.alpha if outcome.step.accepted else 0.0,
        "learning_rate": outcome.optimized.learning_rate,
        "seconds": time.monotonic() - started,
    }


def print_table(found: dict[str, list[dict[str, Any]]]) -> None:
    """Means over repeats. They share their episodes, so the error stays that of one."""
    wide = max(map(len, found))
    print(f"{'variant':{wide}}  {'  '.join(f'{name:>14}' for name in COLUMNS)}  rejected")
    for name, updates in found.items():
        kept = [update for update in updates if "worth" in update]
        means = [f"{statistics.fmean(u[c] for u in kept):14.4g}" if kept else f"{'-':>14}" for c in COLUMNS]
        print(f"{name:{wide}}  {'  '.join(means)}  {len(updates) - len(kept)} of {len(updates)}")


if __name__ == "__main__":
    sys.exit(main())
