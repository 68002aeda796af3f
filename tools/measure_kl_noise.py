"""How noisy the KL estimators are: standard errors of exact, k3 and k1 on the same messages of a team, at a given KL.

    .venv/bin/python tools/measure_kl_noise.py [RECIPE] [section.key=value ...] [--kl 0.01] [--messages 64] [--steps 6] [--json]

Each step moves an agent in a random direction, as far as makes the exact KL of a message `--kl` on average. Two standard errors
of the mean over `--messages` messages are given:
- of everything: one message from each of so many contexts. For small steps k1's is sqrt(2 KL / messages), whatever the base:
  0.018 for 64 messages at 0.01, more than the KL itself. What is left of the exact one is that contexts differ in their KL
- given the contexts: from several messages in each context. That is the estimator's own noise: k1 and k3 see only the tokens that
  were sampled, the exact KL only where they led
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from teamtr_lora.algorithm.occupancy import k1_standard_error
from teamtr_lora.algorithm.surrogate import sum_by_message
from teamtr_lora.algorithm.trust_region import ESTIMATORS
from teamtr_lora.recipe import Recipe, load_recipe
from teamtr_lora.rollout.collector import PlayPlan
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.rollout.sampler import Request, SamplingParams, derive_seed
from teamtr_lora.team import Episode, Message, agent_sequences
from teamtr_lora.training.gate import gate_pass, read_candidate
from teamtr_lora.training.scoring import Scorer, keep_current, unweighted_batch
from teamtr_lora.training.trainer import TeamTRTrainer

ROOT = Path(__file__).resolve().parent.parent
TRIES = 12  # of the step's length; KL is quadratic in it, so two or three are enough


def sampled_messages(playable: PlayableTeam, agent: str, prompts: list[list[int]], recipe: Recipe, copies: int) -> list[Episode]:
    """`copies` messages of the agent in each context; the context is the group."""
    ends = tuple(playable.team.protocol.end_ids)
    params = SamplingParams(recipe.rollout.temperature, recipe.rollout.max_message_tokens, ends)
    waiting = {}
    for place, prompt in enumerate(prompts):
        for copy in range(copies):
            seed = derive_seed("noise", agent, place, copy)
            waiting[playable.sampler.submit(Request(prompt, agent, params, seed))] = (place, prompt, seed)
    episodes = []
    while waiting:
        for completion in playable.sampler.poll():
            place, prompt, seed = waiting.pop(completion.ticket)
            episode = Episode(item_id=str(place), group=place, prompt="", seed=seed)
            episode.messages.append(
                Message(agent, 0, prompt, completion.token_ids, completion.logprobs, completion.version, completion.finish, "")
            )
            episodes.append(episode)
    return sorted(episodes, key=lambda episode: episode.group)


def message_terms(
    playable: PlayableTeam, scorer: Scorer, episodes: list[Episode], recipe: Recipe, agent: str, kl: float, seed: int
) -> dict[str, Tensor]:
    """Each message's terms by estimator, for the agent moved along one random direction until its exact KL is `kl`; the agent is
    put back."""
    batch = unweighted_batch(scorer, agent_sequences(episodes, agent), recipe.training.tokens_per_microbatch)
    bank, before = playable.bank, playable.bank.snapshot(agent)
    generator = torch.Generator().manual_seed(seed)
    noise: dict[str, Tensor] = {n: torch.randn(t.shape, generator=generator).to(t) for n, t in before.items()}
    bank.activate(agent)
    length = 1e-2
    with gate_pass(scorer):
        current = keep_current(scorer, batch)
        try:
            for _ in range(TRIES):
                bank.restore(agent, {n: t + length * noise[n] for n, t in before.items()})
                reading = read_candidate(scorer, batch, current, recipe, 0.5)
                if abs(reading.message_sum_kl / kl - 1) < 0.05:
                    break
                length *= math.sqrt(kl / max(reading.message_sum_kl, 1e-12))
        finally:
            bank.restore(agent, before)
    message_N = torch.cat([part.message_N.cpu() for part in batch.microbatches])
    terms = {n: sum_by_message(t.double(), message_N, len(batch.messages)) for n, t in reading.terms_N.items()}
    order_M = torch.argsort(batch.group_M, stable=True)
    return {name: values_M[order_M] for name, values_M in terms.items()}


def measure(trainer: TeamTRTrainer, *, kl: float, messages: int, steps: int, copies: int) -> dict[str, Any]:
    playable, recipe = trainer.open(), trainer.recipe
    items = [trainer.task.items("train")[i] for i in range(messages)]
    plan = PlayPlan(items, 1, recipe.rollout.temperature, recipe.rollout.max_message_tokens, "noise")
    episodes = playable.play(trainer.task, plan)
    chunk = recipe.training.head_chunk_tokens
    scorer = Scorer(playable.base, playable.bank, temperature=recipe.rollout.temperature, head_chunk_tokens=chunk)
    found: list[float] = []
    whole: dict[str, list[float]] = {name: [] for name in ESTIMATORS}
    given: dict[str, list[float]] = {name: [] for name in ESTIMATORS}
    for number in range(steps):
        agent = playable.team.names[number % len(playable.team.names)]
        prompts = [m.prompt_ids for e in episodes for m in e.messages if m.agent == agent][:messages]
        sampled = sampled_messages(playable, agent, prompts, recipe, copies)
        terms = message_terms(playable, scorer, sampled, recipe, agent, kl, number)
        found.append(float(terms["exact"].mean()))
        for name in ESTIMATORS:
            by_context = terms[name].reshape(len(prompts), copies)
            whole[name].append(math.sqrt(float(by_context[:, 0].var()) / len(prompts)))
            given[name].append(math.sqrt(float(by_context.var(1).mean()) / len(prompts)))
    report: dict[str, Any] = {"messages": messages, "steps": steps, "copies": copies, "kl": statistics.fmean(found)}
    report["k1_expected"] = k1_standard_error(report["kl"], messages)
    for what, errors in (("of_everything", whole), ("given_the_contexts", given)):
        means = {name: statistics.fmean(values) for name, values in errors.items()}
        report[what] = {**means, "k1_over_exact": means["k1"] / means["exact"], "k3_over_exact": means["k3"] / means["exact"]}
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="RECIPE | section.key=value")
    parser.add_argument("--kl", type=float, default=0.01)
    parser.add_argument("--messages", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--copies", type=int, default=4, help="messages in each context")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_intermixed_args(arguments)
    recipes = [Path(word) for word in args.words if "=" not in word] or [ROOT / "recipes" / "quickstart.yaml"]
    trainer = TeamTRTrainer.from_recipe(load_recipe(recipes[0], [word for word in args.words if "=" in word]))
    try:
        found = measure(trainer, kl=args.kl, messages=args.messages, steps=args.steps, copies=args.copies)
    finally:
        trainer.close()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    expected = f"sqrt(2 KL / messages) = {found['k1_expected']:.4f}"
    print(f"KL {found['kl']:.4f}, {found['messages']} messages, {found['steps']} steps; {expected}")
    for what in ("of_everything", "given_the_contexts"):
        e = found[what]
        print(
            f"{what.replace('_', ' ')}: standard error k1 {e['k1']:.4f}, k3 {e['k3']:.5f}, exact {e['exact']:.5f}; "
            f"k1 / exact {e['k1_over_exact']:.1f}, k3 / exact {e['k3_over_exact']:.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
