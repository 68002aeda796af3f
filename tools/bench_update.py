"""Where one update's time goes on this machine, and what two of its shortcuts are worth; ratios are of one run.

    .venv/bin/python tools/bench_update.py [RECIPE] [section.key=value ...]

- shared prefix: the update with the common prefix of a group computed once, against one row an episode
- mixed batch: requests of all agents decoded in one batch, against one batch an agent, by requests per agent
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from accelerate import Accelerator

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import load_recipe
from teamtr_lora.rollout import transformers_engine
from teamtr_lora.rollout.collector import PlayPlan
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.rollout.sampler import Request, SamplingParams
from teamtr_lora.team import Episode
from teamtr_lora.training.trainer import TeamTRTrainer
from teamtr_lora.training.update import AgentUpdater

ROOT = Path(__file__).resolve().parent.parent


def timed_update(
    updater: AgentUpdater, playable: PlayableTeam, agent: str, episodes: list[Episode], packed: bool
) -> dict[str, float]:
    width = updater.scorer.pack_width
    updater.scorer.pack_width = width if packed else None
    before = playable.bank.snapshot(agent)
    try:
        return updater.update(agent, episodes, 0).seconds
    finally:
        updater.scorer.pack_width = width
        playable.bank.restore(agent, before)


def decode_seconds(playable: PlayableTeam, prompt: list[int], rows: int, tokens: int, mixed: bool) -> float:
    """`rows` requests for every agent, all of the same length; no request stops early."""
    params = SamplingParams(1.0, tokens, ())
    limits, saved = transformers_engine.MIXED_ROWS, dict(transformers_engine.MIXED_ROWS)
    limits.update(dict.fromkeys(limits, 10**9 if mixed else 0))
    try:
        for agent in playable.team.names:
            for seed in range(rows):
                playable.sampler.submit(Request(prompt, agent, params, seed))
        started = time.perf_counter()
        left = rows * len(playable.team.names)
        while left:
            left -= len(playable.sampler.poll())
        return time.perf_counter() - started
    finally:
        limits.update(saved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="RECIPE | section.key=value")
    settings = parser.parse_args().settings
    named = bool(settings) and "=" not in settings[0]
    try:
        recipe = load_recipe(settings[0] if named else ROOT / "recipes" / "quickstart.yaml", settings[named:])
    except UserError as error:
        parser.error(str(error))
    trainer = TeamTRTrainer.from_recipe(recipe)
    playable, rollout = trainer.open(), recipe.rollout
    items = [trainer.task.items("train")[i] for i in range(rollout.items_per_stage)]
    plan = PlayPlan(
        items=items,
        episodes_per_item=rollout.episodes_per_item,
        temperature=rollout.temperature,
        max_message_tokens=rollout.max_message_tokens,
        purpose="bench",
    )
    playable.play(trainer.task, plan)  # warm-up
    started = time.perf_counter()
    episodes = playable.play(trainer.task, plan)
    seconds = time.perf_counter() - started
    print(f"rollout: {len(episodes)} episodes, {sum(e.tokens for e in episodes) / seconds:,.0f} tokens/s, {seconds:.2f} s")
    print(f"\n{'update':<14} {'rows':<14} {'current':>8} {'optimize':>9} {'gate':>6}   seconds")
    for agent in playable.team.names:
        totals = []
        for packed in (True, False):
            updater = AgentUpdater(playable, recipe, Accelerator(cpu=playable.base.device.type == "cpu"))
            timed_update(updater, playable, agent, episodes, packed)  # warm-up
            updater = AgentUpdater(playable, recipe, Accelerator(cpu=playable.base.device.type == "cpu"))
            phases = timed_update(updater, playable, agent, episodes, packed)
            if not phases:
                print(f"{agent:<14} skipped: no reward variance in these episodes")
                break
            totals.append(sum(phases.values()))
            rows = "shared prefix" if packed else "one an episode"
            print(f"{agent:<14} {rows:<14} {phases['current']:>8.2f} {phases['optimize']:>9.2f} {phases['gate']:>6.2f}")
        if len(totals) == 2:
            print(f"{'':<14} ratio {totals[1] / totals[0]:.2f}")
    print(f"\n{'mixed batch':<24} {'one batch an agent':>20} {'one mixed batch':>16} {'ratio':>6}   seconds")
    prompt = episodes[0].messages[0].prompt_ids
    for agent in playable.team.names:
        playable.publish(playable.bank.commit(agent))  # the sampler checks that what it samples was published
    for rows in (1, 4, 16, 64):
        times = [min(decode_seconds(playable, prompt, rows, 8, mixed) for _ in range(3)) for mixed in (False, True)]
        print(f"{rows:>4} requests an agent {'':<5} {times[0]:>20.3f} {times[1]:>16.3f} {times[0] / times[1]:>6.2f}")
    if torch.cuda.is_available():
        print(f"\npeak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
