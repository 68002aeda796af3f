"""The measures of bench_rollout.py: a workload of episodes, and what an engine takes to play, publish, sleep and wake."""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase, load_base
from teamtr_lora.recipe import LoraSection, RolloutSection, TeamSection
from teamtr_lora.rollout.collector import PlayPlan, play
from teamtr_lora.rollout.engines import open_sampler
from teamtr_lora.rollout.sampler import Completion, Request, Sampler, SamplingParams, derive_seed
from teamtr_lora.tasks import Item, Task
from teamtr_lora.team import build_team

# --- the workload


def lengths(count: int, mean: int, *, uneven: bool, seed: int) -> list[int]:
    """Message lengths in tokens; uneven ones are log-normal with the same mean, at most four times it."""
    if not uneven:
        return [mean] * count
    rng = random.Random(seed)
    drawn = [rng.lognormvariate(0, 1) for _ in range(count)]
    scale = mean / statistics.mean(drawn)
    return [max(1, min(4 * mean, round(x * scale))) for x in drawn]


def run_episodes(
    sampler: Sampler,
    agents: list[str],
    args: argparse.Namespace,
    *,
    seed: int,
    turns: int,
    uneven: bool = False,
    barrier: bool = False,
    apart: bool = False,
) -> dict:
    """Tokens and episodes per second of --episodes episodes of `turns` messages."""
    rng = random.Random(seed)
    plan = lengths(args.episodes * turns, args.message_tokens, uneven=uneven, seed=0)  # the same for all that is compared
    prompts = [[rng.randrange(8, args.vocab) for _ in range(args.prompt_tokens)] for _ in range(args.episodes)]
    turn = [0] * args.episodes
    waiting: dict[int, int] = {}

    def ask(e: int) -> None:
        params = SamplingParams(1.0, plan[e * turns + turn[e]], ())
        which = (e + turn[e]) % len(agents)
        prompt = [8 + which, *prompts[e][1:]] if apart else prompts[e]
        waiting[sampler.submit(Request(prompt, agents[which], params, derive_seed(seed, e, turn[e])))] = e

    tokens, held = 0, []
    started = time.perf_counter()
    for e in range(args.episodes):
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
    seconds = time.perf_counter() - started
    return {"tokens_per_second": tokens / seconds, "episodes_per_second": args.episodes / seconds, "tokens": tokens}


def timed(sampler: Sampler, agents: list[str], args: argparse.Namespace, **how: Any) -> dict:
    """The best and the median of --repeats runs, after one that compiles, captures and fills caches. No two runs share a prompt,
    or one would find in the prefix cache what another left there."""
    base = derive_seed(len(agents), args.episodes, *sorted(how.items()))
    runs = [run_episodes(sampler, agents, args, seed=base + i, **how) for i in range(args.repeats + 1)][1:]
    return best_of(runs)


def best_of(runs: list[dict]) -> dict:
    best = max(runs, key=lambda run: run["tokens_per_second"])
    return {**best, "median_tokens_per_second": statistics.median(run["tokens_per_second"] for run in runs)}


# --- pieces


def make_base(args: argparse.Namespace) -> FrozenBase:
    return load_base(args.base, device=args.device, precision=args.precision)


def make_bank(base: FrozenBase, args: argparse.Namespace, agents: int) -> AdapterBank:
    """Adapters whose B is not zero, as after training."""
    bank = AdapterBank(base.model, {f"a{i}": LoraSection(rank=args.rank) for i in range(agents)}, base_name=args.base, seed=0)
    for agent in bank.agents:
        move(bank, agent, 0.01)
    return bank


@torch.no_grad()
def move(bank: AdapterBank, agent: str, size: float) -> Any:
    for name, parameter in bank.parameters(agent).items():
        if "lora_B" in name:
            parameter.add_(torch.randn_like(parameter) * size)
    return bank.commit(agent)


def open_engine(base: FrozenBase, bank: AdapterBank, args: argparse.Namespace, **section: Any) -> Sampler:
    # a share for the engine beside the trainer's own base; more than one process is never measured at once
    rollout = RolloutSection(requests_per_batch=max(args.episodes, 8), **section)
    sampler = open_sampler(base, bank, rollout, context_tokens=args.context)
    for agent in bank.agents:
        sampler.publish(bank.version(agent))
    return sampler


def publish_latency(sampler: Sampler, bank: AdapterBank, device: torch.device, repeats: int = 30) -> dict:
    """Milliseconds until a moved adapter is in place, and until its first token, for a prompt already in the prefix cache."""
    publish, first = [], []
    for i in range(repeats):
        agent = bank.agents[i % len(bank.agents)]
        version = move(bank, agent, 1e-4)
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        sampler.publish(version)
        published = time.perf_counter()
        sampler.submit(Request(list(range(8, 40)), agent, SamplingParams(1.0, 1, ()), i))
        while not (got := sampler.poll()):
            pass
        assert got[0].version == version.name
        publish.append((published - started) * 1e3)
        first.append((time.perf_counter() - published) * 1e3)
    size = sum(p.numel() * p.element_size() for p in bank.parameters(bank.agents[0]).values())
    return {
        "publish_ms_median": statistics.median(publish),
        "publish_ms_max": max(publish),
        "first_publish_ms": publish[0],
        "first_token_ms_median": statistics.median(first),
        "adapter_bytes": size,
    }


def sleep_and_wake(sampler: Any, bank: AdapterBank, args: argparse.Namespace) -> dict:
    """Seconds and GPU memory of lending the engine's memory to an update, and whether its adapters answer as before."""
    before = same_completions(sampler, bank, args)
    free = torch.cuda.mem_get_info()[0]
    started = time.perf_counter()
    with sampler.training_memory():
        slept = time.perf_counter() - started
        freed = torch.cuda.mem_get_info()[0] - free
    started = time.perf_counter()
    sampler.memory.wake()
    woken = time.perf_counter() - started
    after = same_completions(sampler, bank, args)
    return {"sleep_seconds": slept, "wake_seconds": woken, "freed_gib": freed / 2**30, "same_tokens": before == after}


def open_twice(base: FrozenBase, bank: AdapterBank, args: argparse.Namespace) -> dict:
    """Two engines one after the other in this process: what closing each leaves allocated, and whether both say the same."""
    found: dict[str, Any] = {}
    said = []
    free = torch.cuda.mem_get_info()[0] if base.device.type == "cuda" else 0
    for which in ("first", "second"):
        started = time.perf_counter()
        sampler = open_engine(base, bank, args, engine="vllm", vllm=args.vllm)
        found[f"{which}_start_seconds"] = time.perf_counter() - started
        said.append(same_completions(sampler, bank, args))
        sampler.close()
        found |= {f"{which}_{name}": value for name, value in left_after_close(base.device, free).items()}
    return {**found, "same_tokens": said[0] == said[1]}


def left_after_close(device: torch.device, free: int) -> dict:
    """What a closed engine has left allocated; `free`: the bytes that were free before it was opened."""
    return {"left_gib": (free - torch.cuda.mem_get_info()[0]) / 2**30} if device.type == "cuda" else {}


def same_completions(sampler: Sampler, bank: AdapterBank, args: argparse.Namespace) -> list[list[int]]:
    asked = [Request([9] * 16, agent, SamplingParams(0.1, args.message_tokens, ()), 0) for agent in bank.agents]
    tickets = [sampler.submit(request) for request in asked]
    done: dict[int, list[int]] = {}
    while len(done) < len(asked):
        done |= {completion.ticket: completion.token_ids for completion in sampler.poll()}
    return [done[ticket] for ticket in tickets]


@torch.no_grad()
def logprob_gap(sampler: Sampler, bank: AdapterBank, args: argparse.Namespace) -> dict:
    """Sampler against trainer log-probabilities of the same sampled tokens, per token."""
    rng = random.Random(3)
    prompts = [[rng.randrange(8, args.vocab) for _ in range(args.prompt_tokens)] for _ in range(8)]
    tickets = {}
    for i, prompt in enumerate(prompts):
        agent = bank.agents[i % len(bank.agents)]
        request = Request(prompt, agent, SamplingParams(1.0, args.message_tokens, ()), i)
        tickets[sampler.submit(request)] = (prompt, agent)
    done: list[Completion] = []
    while len(done) < len(tickets):
        done += sampler.poll()
    gaps: list[float] = []
    for completion in done:
        prompt, agent = tickets[completion.ticket]
        bank.activate(agent)
        ids = torch.tensor([prompt + completion.token_ids], device=next(bank.model.parameters()).device)
        logits_T_V = bank.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        logp_T = torch.log_softmax(logits_T_V, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        gaps += (logp_T.cpu() - torch.tensor(completion.logprobs)).abs().tolist()
    return {"logprob_gap_mean": statistics.mean(gaps), "logprob_gap_max": max(gaps)}


def time_shares(sampler: Any, run: Callable[[], Any]) -> dict:
    """Where the engine's time goes while `run` plays: seconds by call, in this thread, and how many steps it took."""
    core = sampler.parts.engine.engine_core.engine_core
    spent: dict[str, float] = {}
    calls: Counter[str] = Counter()
    watched = [(core.scheduler, "schedule"), (core.scheduler, "update_from_output"), (core.model_executor, "execute_model"),
               (core.model_executor, "sample_tokens"), (sampler, "_admit"), (sampler, "_step")]  # fmt: skip

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def timed_call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return real(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - started
                calls[name] += 1

        setattr(owner, name, timed_call)

    before = [vars(owner).get(name) for owner, name in watched]
    for owner, name in watched:
        watch(owner, name)
    started = time.perf_counter()
    try:
        run()
    finally:
        for (owner, name), own in zip(watched, before, strict=True):
            delattr(owner, name) if own is None else setattr(owner, name, own)
    total = time.perf_counter() - started
    inside = sum(seconds for name, seconds in spent.items() if name != "_step")
    waiting = spent["_step"] - inside  # blocked on the GPU's result, and reading tokens out
    return {**{n: s for n, s in spent.items() if n != "_step"}, "waiting and reading": waiting,
            "outside the engine": total - spent["_step"], "total": total, "steps": calls["execute_model"]}  # fmt: skip


class _Echo(Task):
    """Prompts of a few words; nothing is right or wrong."""

    name = "echo"

    def items(self, split: str) -> Any:
        return None

    def score(self, episodes: Any) -> list[float]:
        return [0.0 for _ in episodes]


def text_episodes(base: FrozenBase, bank: AdapterBank, sampler: Sampler, args: argparse.Namespace, only: str = "") -> dict:
    """The whole way: protocol, collector, task."""
    section = TeamSection.model_validate({"agents": [{"name": name} for name in bank.agents]})
    team = build_team(section, base.tokenizer, base_context_tokens=args.context)
    versions = {agent: bank.version(agent).name for agent in bank.agents}
    runs: list[dict] = []
    for run in [only] if only else ["warm", *map(str, range(args.repeats)), *(["profiled"] if args.profile else [])]:
        items = [Item(f"{run}-{i}", f"{run} question {i}: what is {i} plus {3 * i}?") for i in range(max(1, args.episodes // 8))]
        profile = cProfile.Profile()
        if run == "profiled":
            profile.enable()
        started = time.perf_counter()
        episodes = play(team, _Echo(), sampler, PlayPlan(items, 8, 1.0, args.message_tokens, run), versions)
        seconds = time.perf_counter() - started
        if run == "profiled":
            profile.disable()
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(35)
            break
        tokens = sum(e.tokens for e in episodes)
        runs.append({"tokens_per_second": tokens / seconds, "episodes_per_second": len(episodes) / seconds, "tokens": tokens})
    return best_of(runs if only else runs[1:])
