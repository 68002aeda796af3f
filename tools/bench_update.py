"""What an update costs here: tokens per second of its passes, its memory beside the model's, how it grows, and large bases.

    python tools/bench_update.py                                                        # the embedded base, seconds, on a CPU
    python tools/bench_update.py --parts passes,memory --base random:qwen3-1.7b --out bench --profile
    python tools/bench_update.py --parts growth --base random:qwen3-1.7b --engine vllm --out bench
    python tools/bench_update.py --parts large --base random:qwen3-8b --engine vllm training.gradient_checkpointing=true

`passes` and `memory` make their episodes of drawn token ids, so no engine is needed: `passes` times the pass that makes a
gradient, counts its operations and says what share of the device's arithmetic that is; `memory` compares the peak of whole
updates with the memory model that `plan` and `tokens_per_microbatch: auto` go by. `growth` and `large` sample with the engine:
`growth` varies agents, message length and episodes, one at a time; `large` makes one stage of three agents. Both put the most
that the driver counted on the GPU beside what `plan` says of the recipe. Every measurement is written to --out as soon as it is
there, and one that is there is not made again. Every part has a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._dynamo.utils import counters
from update_memory import memory_beside_the_model, whole_memory
from update_shapes import add_update_options, random_base, update_recipe

from teamtr_lora.base.frozen_base import BaseFacts, base_facts
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe, TeamSection
from teamtr_lora.rollout.collector import PlayPlan
from teamtr_lora.rollout.playable import PlayableTeam, open_team
from teamtr_lora.tasks import Item, Task
from teamtr_lora.team import Episode, Message, build_team
from teamtr_lora.training.batches import MessageBatch
from teamtr_lora.training.optimize import Minibatch, accumulate
from teamtr_lora.training.rows import decision_reason
from teamtr_lora.training.update import AgentUpdater
from teamtr_lora.training.window import Material, PlayedEpisodes

# Dense half-precision products a second, as the makers state them, by a word of the device's name.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
Measure = Iterator[tuple[str, dict[str, Any]]]


class Drawn(Task):
    """Rewards are drawn from text and seed: every group has something to learn from, and nothing a meaning."""

    name = "drawn"

    def items(self, split: str) -> Any:
        return None

    def score(self, episodes: Any) -> list[float]:
        return [(sum(map(ord, episode.messages[-1].text[-64:])) + episode.seed) % 8 / 7 for episode in episodes]


def recipe_of(args: argparse.Namespace, *, agents: int, prompts: int, tokens: int, **training: Any) -> Recipe:
    from teamtr_lora.recipe.recipe_files import load_recipe

    data = update_recipe(args, agents=agents, prompts=prompts, tokens=tokens, **training)
    data["trust_region"]["gate_precision"] = "tf32"  # what a run would find
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(json.dumps(data))
        file.flush()
        return load_recipe(file.name, args.settings)


def opened(recipe: Recipe) -> PlayableTeam:
    return open_team(recipe.base, recipe.team, recipe.rollout, seed=0, folder=Path.cwd())


def drawn_episodes(recipe: Recipe, playable: PlayableTeam, prompt_tokens: int) -> list[Episode]:
    """One message of each agent, of its whole length."""
    rng, vocabulary = random.Random(0), min(len(playable.base.tokenizer), playable.base.vocab_size)
    rollout, episodes = recipe.rollout, []
    for group in range(rollout.items_per_stage):
        prompt = [rng.randrange(vocabulary) for _ in range(prompt_tokens)]
        for number in range(rollout.episodes_per_item):
            episode = Episode(str(group), group, "", number, rewards=[rng.random()])
            said = [rng.randrange(vocabulary) for _ in range(rollout.max_message_tokens)]
            agent = playable.team.names[0]
            logprobs = [-1.0] * len(said)
            episode.messages = [Message(agent, 0, prompt, said, logprobs, playable.versions()[agent], "stop", "")]
            episodes.append(episode)
    return episodes


def seconds_of(work: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


# --- parts


def operations(facts: BaseFacts, batch: MessageBatch, rank: int) -> float:
    """Of one pass with gradients, in multiplications and additions. The base's weights get no gradient: forward and backward are
    one product each. Adapters: three in the forward (their factors have two parts) and four in the backward. Attention sees half
    of all pairs; its backward counts two and a half times. The head: logits and the mean head row."""
    weights = sum(linear.in_features * linear.out_features for linear in facts.linears)
    adapters = sum(rank * (linear.in_features + linear.out_features) for linear in facts.linears)
    places = sum(part.rows.ids_B_T.numel() for part in batch.microbatches)
    pairs = sum(attention_pairs(part.rows) for part in batch.microbatches)
    attention = 4 * pairs * facts.heads * facts.head_dim * facts.layers * 3.5
    head = batch.tokens * 4 * facts.vocab_size * facts.hidden_size
    return places * (4 * weights + 2 * (3 + 4) * adapters) + attention + head


def attention_pairs(rows: Any) -> float:
    """A causal part sees half of its pairs; the rests of an opening see all of it."""
    if rows.segments is None:
        return float(rows.ids_B_T.shape[0] * rows.ids_B_T.shape[1] ** 2 / 2)
    parts, keys = (ends.cpu().diff().double() for ends in (rows.segments.part_S, rows.segments.keys_S))
    return float((parts * keys - parts**2 / 2).sum())


def part_passes(args: argparse.Namespace, done: set[str]) -> Measure:
    """The pass that makes a gradient, by micro-batch size."""
    recipe = recipe_of(args, agents=1, prompts=args.prompts, tokens=args.message_tokens)
    playable = opened(recipe)
    facts, episodes = base_facts(playable.base.folder), drawn_episodes(recipe, playable, args.prompt_tokens)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    peak = next((flops for word, flops in PEAK_FLOPS.items() if word in name), None)
    for size in ["auto", *args.sizes]:
        if f"{size}" in done:
            continue
        chosen = recipe.model_copy(update={"training": recipe.training.model_copy(update={"tokens_per_microbatch": size})})
        updater = AgentUpdater(playable, chosen)
        yield str(size), timed_pass(args, updater, episodes, facts, peak)
        del updater
        gc.collect()


def timed_pass(
    args: argparse.Namespace, updater: AgentUpdater, episodes: list[Episode], facts: BaseFacts, peak: float | None
) -> dict[str, Any]:
    agent = episodes[0].messages[0].agent
    material = Material(newest=PlayedEpisodes(episodes))
    split = updater._split(agent, material, updater._advantages(agent, material), 0)
    assert split is not None
    batch = split.fit[0]
    busy = None  # seconds of a profiled pass in which the device computed
    with updater._learning(agent, lambda: None) as learner:
        minibatch = Minibatch(batch)
        first = seconds_of(lambda: accumulate(learner, minibatch, 0.1))
        runs = [seconds_of(lambda: accumulate(learner, minibatch, 0.1)) for _ in range(args.repeats)]
        if args.profile and torch.cuda.is_available():
            with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
                seconds_of(lambda: accumulate(learner, minibatch, 0.1))
            events = profile.key_averages()
            print(events.table(sort_by="self_cuda_time_total", row_limit=25), file=sys.stderr, flush=True)
            busy = sum(e.self_device_time_total for e in events if e.device_type == torch.autograd.DeviceType.CUDA) / 1e6
    real = sum(len(message.prompt_ids) + len(message.token_ids) for message in batch.messages)  # as if no prefix were shared
    count = operations(facts, batch, args.rank)
    found = {
        "tokens_per_microbatch": updater.scorer.tokens_per_microbatch,
        "microbatches": len(batch.microbatches),
        "tokens": real,
        "computed_tokens": sum(part.rows.ids_B_T.numel() for part in batch.microbatches),
        "first_seconds": first,
        "seconds": min(runs),
        "busy_seconds": busy,
        "tokens_per_second": real / min(runs),
        "operations_per_token": count / real,
        "compiled_graphs": counters["stats"]["unique_graphs"],  # so far in this process: one that grows with sizes is a storm
    }
    if peak is not None:
        found |= {"limit_tokens_per_second": peak * real / count, "share_of_limit": count / min(runs) / peak}
    return found


def part_memory(args: argparse.Namespace, done: set[str]) -> Measure:
    """The peak of whole updates beside the model's, by path and size of a micro-batch."""
    if not torch.cuda.is_available():
        yield "skipped", {"why": "the peak of tensors is counted on a GPU only"}
        return
    shapes = [(size, how) for how in ("compiled", "fused", "checkpointing") for size in args.sizes]
    for size, how in shapes:
        name = f"{how} {size}"
        if name in done:
            continue
        settings = {"compile": how != "fused", "gradient_checkpointing": how == "checkpointing", "tokens_per_microbatch": size}
        args_once = argparse.Namespace(**vars(args) | {"passes": 2})
        recipe = recipe_of(args_once, agents=1, prompts=args.prompts, tokens=args.message_tokens, **settings)
        try:
            yield name, peak_of_update(args, recipe)
        except torch.OutOfMemoryError as error:
            yield name, {"out of memory": str(error)[:120]}
        gc.collect()
        torch.cuda.empty_cache()


def peak_of_update(args: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    playable = opened(recipe)
    updater = AgentUpdater(playable, recipe)
    episodes = drawn_episodes(recipe, playable, args.prompt_tokens)
    with memory_beside_the_model(playable, updater, recipe) as found:
        updater.update(playable.team.names[0], Material(newest=PlayedEpisodes(episodes)), 0)
    return found


def part_growth(args: argparse.Namespace, done: set[str]) -> Measure:
    """Sampling, passes and gate of the first agent's update as one size grows, in one engine. One update compiles for all."""
    longest, most = max(args.lengths), max(args.agents)
    recipe = recipe_of(args, agents=most, prompts=args.prompts, tokens=longest)
    playable = opened(recipe)
    try:
        sizes = [("agents", n, n, args.message_tokens, args.prompts) for n in args.agents]
        sizes += [("message tokens", n, 1, n, args.prompts) for n in args.lengths]
        sizes += [("episodes", n * args.group, 1, args.message_tokens, n) for n in args.prompt_counts]
        todo = [size for size in sizes if f"{size[0]} {size[1]}" not in done]
        for _, _, agents, tokens, prompts in todo[:1]:
            best_update(args, playable, 1, agents=agents, tokens=tokens, prompts=prompts)
        for what, size, agents, tokens, prompts in todo:
            yield f"{what} {size}", best_update(args, playable, args.repeats, agents=agents, tokens=tokens, prompts=prompts)
    finally:
        playable.close()


def best_update(
    args: argparse.Namespace, whole: PlayableTeam, repeats: int, *, agents: int, tokens: int, prompts: int
) -> dict[str, Any]:
    recipe = recipe_of(args, agents=agents, prompts=prompts, tokens=tokens)
    section = TeamSection.model_validate(recipe.team.model_dump())
    team = build_team(section, whole.base.tokenizer, base_context_tokens=whole.base.context_tokens)
    playable = PlayableTeam(whole.base, whole.bank, team, whole.sampler)
    updater = AgentUpdater(playable, recipe)
    with whole_memory(recipe) as memory:
        runs = [stage_of(args, playable, updater, recipe, agents=1, purpose=str(i)) for i in range(repeats)]
    best = min(runs, key=lambda run: run["update"])
    return best | memory | {"seconds_per_1000_tokens": 1000 * best["update"] / best["sampled_tokens"]}


def stage_of(
    args: argparse.Namespace, playable: PlayableTeam, updater: AgentUpdater, recipe: Recipe, *, agents: int, purpose: str
) -> dict[str, Any]:
    """Rollout, update and publish of the first `agents`, added up by phase."""
    total: dict[str, Any] = {"update": 0.0, "sampled_tokens": 0}
    rollout = recipe.rollout
    for agent in playable.team.names[:agents]:
        texts = [f"{purpose} {agent} {i}: " + "7 " * (args.prompt_tokens // 2) for i in range(rollout.items_per_stage)]
        plan = PlayPlan(
            [Item(text, text) for text in texts], rollout.episodes_per_item, temperature=1.0,
            max_message_tokens=rollout.max_message_tokens, purpose=f"{purpose} {agent}",
        )  # fmt: skip
        started = time.perf_counter()
        episodes = playable.play(Drawn(), plan)
        sampled = time.perf_counter()
        with playable.training_memory(), memory_beside_the_model(playable, updater, recipe) as memory:
            outcome = updater.update(agent, Material(newest=PlayedEpisodes(episodes)), 0)
        updated = time.perf_counter()
        if outcome.decision == "skipped":
            raise RuntimeError(f"an update was skipped, which takes no time ({decision_reason(outcome)}): give a larger --group")
        total |= memory
        if outcome.accepted:
            playable.publish(outcome.version)
        phases = {"rollout": sampled - started, **outcome.seconds, "publish": time.perf_counter() - updated}
        total |= {phase: total.get(phase, 0.0) + seconds for phase, seconds in phases.items()}
        total["update"] += time.perf_counter() - started
        total["sampled_tokens"] += sum(episode.tokens for episode in episodes)
        total["compiled_graphs"] = counters["stats"]["unique_graphs"]  # so far in this process
        print(f"  {agent}: {outcome.decision}, {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    return total


def part_large(args: argparse.Namespace, done: set[str]) -> Measure:
    """One stage of three agents, without and with a base in 4 bits."""
    for quantization in ("none", "4bit"):
        if quantization in done:
            continue
        settings = [*args.settings, f"base.quantization={quantization}"]
        once = argparse.Namespace(**vars(args) | {"settings": settings})
        try:
            recipe = recipe_of(once, agents=3, prompts=args.prompts, tokens=args.message_tokens)
            started = time.perf_counter()
            playable = opened(recipe)
            found: dict[str, Any] = {"start_seconds": time.perf_counter() - started}
            updater = AgentUpdater(playable, recipe)
            found["tokens_per_microbatch"] = updater.scorer.tokens_per_microbatch
            with whole_memory(recipe) as memory:
                stage = stage_of(args, playable, updater, recipe, agents=3, purpose="stage")
            yield quantization, found | stage | memory
            playable.close()
        except UserError as error:
            yield quantization, {"not measured": str(error)}
        playable = updater = None  # type: ignore[assignment]
        gc.collect()
        torch.cuda.empty_cache() if torch.cuda.is_available() else None


PARTS: dict[str, Callable[[argparse.Namespace, set[str]], Measure]] = {
    "passes": part_passes,
    "memory": part_memory,
    "growth": part_growth,
    "large": part_large,
}


# --- the command


def whole_numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="passes", help="with commas: " + ", ".join(PARTS))
    add_update_options(parser, memory_share=0.3)
    parser.add_argument("--sizes", type=whole_numbers, default=[512, 2048], help="tokens per micro-batch, with commas")
    parser.add_argument("--agents", type=whole_numbers, default=[1, 2, 4, 8])
    parser.add_argument("--lengths", type=whole_numbers, default=[8, 16], help="message tokens, for growth")
    parser.add_argument("--prompt-counts", type=whole_numbers, default=[4, 8], help="groups of an update, for growth")
    parser.add_argument("--profile", action="store_true", help="passes: torch's profile of one pass on a GPU, to stderr")
    parser.add_argument("--budget", type=float, help="share of activations that compiled layers keep (1: torch's own choice)")
    parser.add_argument("--out", type=Path, help="folder for the results; what is there is not measured again")
    args = parser.parse_args()
    if unknown := set(args.parts.split(",")) - PARTS.keys():
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    return args


def shown(name: str, numbers: dict[str, Any]) -> str:
    cells = [f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in numbers.items()]
    return f"{name}: " + ", ".join(cells)


def child(args: argparse.Namespace) -> None:
    part, _, done = args.child.partition(":")
    within = nullcontext()
    if args.budget is not None:
        within = functorch_config.patch(activation_memory_budget=args.budget)  # type: ignore[attr-defined]
    with within:
        for name, numbers in PARTS[part](args, set(filter(None, done.split(";")))):
            print("RESULT " + json.dumps([name, numbers]), flush=True)


def main() -> int:
    args = parse()
    if args.child:
        child(args)
        return 0
    failed = False
    command = [sys.executable, *sys.argv]
    if args.base.startswith("random:"):
        command += ["--base", str(random_base(args.base.removeprefix("random:"), "auto"))]
    for part in args.parts.split(","):
        file = args.out / f"{part}.json" if args.out else None
        results: dict[str, Any] = json.loads(file.read_text()) if file and file.exists() else {}
        for name, numbers in results.items():
            print(shown(f"{part} {name} (measured before)", numbers))
        with subprocess.Popen([*command, "--child", f"{part}:{';'.join(results)}"], stdout=subprocess.PIPE, text=True) as run:
            for line in run.stdout or ():
                if not line.startswith("RESULT "):
                    continue
                name, numbers = json.loads(line.removeprefix("RESULT "))
                results[name] = numbers
                print(shown(f"{part} {name}", numbers), flush=True)
                if file:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(json.dumps(results, indent=2))
        failed = failed or run.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
