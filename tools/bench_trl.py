"""One update of TRL's GRPOTrainer beside one of ours, on the same base, prompts, lengths, rank and number of passes.

    python tools/bench_trl.py                                              # the embedded base, a minute or two, on a CPU
    python tools/bench_trl.py --shape 1.7b-256 --trl default,liger,64 --out bench
    python tools/bench_trl.py --shape 1.7b-1024 --trl default,liger --out bench-1024
    python tools/bench_trl.py --base random:qwen3-1.7b --prompts 32 --message-tokens 256 --engine vllm

Both sides stay loaded in processes of their own and take turns, an update each, so that what the machine does meanwhile
happens to both. --trl names TRL's settings to try: default, liger (its fused loss), or a number of rows per micro-batch; each
is a pair with ours, and a pair that --out has already is not run again. Each side learns from --prompts groups of --group
episodes in --passes passes. Ours plays a quarter more groups, on which the gate judges the update; their sampling and the gate
are in its time, and so is publishing what it accepts and copying it for the disk. Rewards are drawn from the text, so that
every group has something to learn from; with random weights the numbers are about speed alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from update_shapes import add_update_options, random_base, update_recipe

REWARD = '''"""A reward that differs within every group and means nothing."""


def drawn_from_text(prompts, completions, **columns):
    return [sum(map(ord, text[-64:])) % 8 / 7 for text in completions]
'''
UPDATES_TO_WARM_UP = 1
ACCEPTED, MEMORY = "accepted", ("allocated GiB", "reserved GiB")
NO_TIMES = {ACCEPTED, *MEMORY}
SHAPES: dict[str, dict[str, Any]] = {
    "1.7b-256": {"base": "random:qwen3-1.7b", "prompts": 32, "group": 8, "message_tokens": 256, "engine": "vllm"},
    "1.7b-1024": {"base": "random:qwen3-1.7b", "prompts": 8, "group": 8, "prompt_tokens": 512, "message_tokens": 1024,
                  "engine": "vllm", "trl_rows": 8},
    "smollm2-24": {"base": "random:smollm2-135m", "prompts": 64, "group": 8, "message_tokens": 24, "engine": "vllm",
                   "trl_rows": 128},
}  # fmt: skip


def write_inputs(args: argparse.Namespace, folder: Path) -> None:
    """The prompts, the reward and our recipe, in one folder for both sides."""
    from transformers import AutoTokenizer

    from teamtr_lora.base.source import resolve

    tokenizer = AutoTokenizer.from_pretrained(resolve(args.base))
    recipe = update_recipe(args, agents=1, prompts=args.prompts, tokens=args.message_tokens)
    rounds = args.repeats + UPDATES_TO_WARM_UP
    rows = []
    for number in range(max(64, 2 * rounds * recipe["rollout"]["items_per_stage"])):
        text = f"{number}+"
        while missing := max(0, args.prompt_tokens - len(tokenizer(text, add_special_tokens=False).input_ids)):
            text += "".join(str((number * 7919 + place * 31) % 10) for place in range(missing))
        rows.append(json.dumps({"prompt": text}))
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "bench_reward.py").write_text(REWARD)
    recipe |= {
        "task": {"name": "dataset", "path": "prompts.jsonl", "reward": "bench_reward:drawn_from_text", "test_fraction": 0.2},
        "evaluation": {"every_stages": 0, "items": 8},
        "diagnostics": {"save_episodes": "none"},
    }
    recipe["training"]["stages"] = rounds + 1  # which begins, and waits for a turn that it does not get
    (folder / "recipe.yaml").write_text(json.dumps(recipe))


def wait_for_turn(word: str) -> None:
    print(word, flush=True)
    if not sys.stdin.readline():
        sys.exit(0)


class Turns:
    """Says how long the last update took, until the next could begin, then waits for the other side. Mixed into a
    TrainerCallback, which keeps an update's `phases`."""

    phases: dict[str, float] | None = None

    def start(self) -> None:
        if self.phases is not None:
            self.tell(self.phases)
        wait_for_turn("READY")
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.started = time.perf_counter()

    def tell(self, phases: dict[str, float]) -> None:
        memory: dict[str, float] = {}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            memory = {name: peak / 2**30 for name, peak in zip(MEMORY, peaks, strict=True)}
        seconds = time.perf_counter() - self.started
        print("RESULT " + json.dumps({"update": seconds, **phases, **memory}), flush=True)


def ours(args: argparse.Namespace, folder: Path) -> None:
    from transformers import TrainerCallback

    from teamtr_lora import TeamTRTrainer, load_recipe

    wait_for_turn("IMPORTED")

    class Callback(TrainerCallback, Turns):
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            self.start()

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            if logs.get("kind") == "update":
                if logs["decision"] == "skipped":
                    raise RuntimeError(f"ours skipped an update ({logs['reason']}), which takes no time: give a larger --group")
                took = {name: value for name, value in logs["seconds"].items() if isinstance(value, float)}
                self.phases = took | {ACCEPTED: float(logs["alpha"] is not None)}

    recipe = load_recipe(folder / "recipe.yaml", [f"output_dir={folder / 'run'}", *args.settings])
    with TeamTRTrainer.from_recipe(recipe, callbacks=[Callback()]) as trainer:
        trainer.train()


def trl(args: argparse.Namespace, folder: Path, how: str) -> None:
    sys.path.insert(0, str(folder))
    from bench_reward import drawn_from_text  # type: ignore[import-not-found]
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from teamtr_lora.base.source import resolve

    if args.engine == "vllm":
        if importlib.util.find_spec("flashinfer") is None:  # as our own engine does: vLLM looks for its sampler without asking
            os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        import vllm  # noqa: F401  (TRL would import it when it opens the engine)
    wait_for_turn("IMPORTED")
    rows = int(how) if how.isdigit() else args.trl_rows
    micro = min(rows, args.prompts * args.group)
    spent: dict[str, float] = defaultdict(float)

    class Callback(TrainerCallback, Turns):
        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % args.passes == 0:
                self.start()
                spent.clear()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % args.passes == 0:
                whole = time.perf_counter() - self.started
                self.phases = {"rollout": spent["rollout"], "optimize": whole - spent["rollout"]}

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            started = time.perf_counter()
            result = super()._generate_and_score_completions(inputs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            spent["rollout"] += time.perf_counter() - started
            return result

    cuda = torch.cuda.is_available()
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=args.prompts * args.group // micro,
        steps_per_generation=args.prompts * args.group // micro,
        num_generations=args.group,
        num_iterations=args.passes,
        max_completion_length=args.message_tokens,
        max_steps=args.passes * (args.repeats + UPDATES_TO_WARM_UP + 1),
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=cuda,
        use_cpu=not cuda,
        model_init_kwargs={"dtype": "bfloat16" if cuda else "float32"},
        use_vllm=args.engine == "vllm" and cuda,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=args.memory_share,
        vllm_max_model_length=args.prompt_tokens + args.message_tokens + 64,
        use_liger_kernel=how == "liger",
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows_of = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    trainer = Timed(
        model=str(resolve(args.base)),
        reward_funcs=drawn_from_text,
        args=config,
        train_dataset=Dataset.from_list(rows_of),
        peft_config=LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[Callback()],
    )
    trainer.train()


class Side:
    """One side's process: `update` lets it make one and returns what that took."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [*command, "--child", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def end(self) -> None:
        """Waits until its memory is free again. A side that still waits for its turn ends when nobody can give it one."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def wait(self, word: str) -> str:
        for line in self.process.stdout or ():
            if line.startswith(word):
                return line.removeprefix(word)
        raise RuntimeError(f"{self.name} ended with exit status {self.process.wait()}")

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def update(self) -> dict[str, float]:
        self.go()
        result = json.loads(self.wait("RESULT "))
        self.wait("READY")
        return dict(result)


Results = dict[str, list[dict[str, float]]]  # by side


def table(results: Results) -> str:
    """Best and median of every phase, in the order in which an update has them, then what is no time."""
    names = list(dict.fromkeys(name for runs in results.values() for run in runs for name in run if name not in NO_TIMES))
    lines = [f"{'':16s}" + "".join(f"{name:>14s}" for name in names) + "   seconds"]
    for side, runs in results.items():
        for what, pick in (("best", min), ("median", statistics.median)):
            cells = [f"{pick(run.get(name, 0.0) for run in runs):14.3f}" for name in names]
            lines.append(f"{side + ' ' + what:16s}" + "".join(cells))
    for what, pick in (("best", min), ("median", statistics.median)):
        took = {side: pick(run["update"] for run in runs) for side, runs in results.items()}
        lines += [f"{side} takes {took[side] / took['ours']:.2f} times as long ({what})" for side in took if side != "ours"]
    for side, runs in results.items():
        peaks = [f"{name} {max(run[name] for run in runs):.1f}" for name in MEMORY if name in runs[0]]
        accepted = [f"{sum(run[ACCEPTED] for run in runs):.0f} of {len(runs)} updates accepted"] if ACCEPTED in runs[0] else []
        if said := ", ".join(accepted + peaks):
            lines.append(f"{side}: {said}")
    return "\n".join(lines)


def pair(args: argparse.Namespace, command: list[str], how: str, keep: Callable[[Results], None]) -> Results:
    """Ours and TRL with one of its settings, taking turns. Both import at once; they take the GPU one after the other, since
    vLLM measures what is free. `keep` is given the results after every round."""
    began = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - began:5.0f} s  {what}", file=sys.stderr, flush=True)

    sides = [Side(name, command) for name in ("ours", f"TRL {how}")]
    results: Results = {side.name: [] for side in sides}
    rounds = args.repeats + UPDATES_TO_WARM_UP
    try:
        for side in sides:
            side.wait("IMPORTED")
            say(f"{side.name} starts")
            side.go()
            side.wait("READY")
        for number in range(rounds):
            for side in sides:
                took = side.update()
                say(f"{side.name}: {json.dumps({k: round(v, 3) for k, v in took.items()})}")
                if number >= UPDATES_TO_WARM_UP:
                    results[side.name].append(took)
            keep(results)
    finally:
        for side in sides:
            side.end()
    return results


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="base and sizes by name; what else is given comes first")
    add_update_options(parser, memory_share=0.15)
    parser.add_argument("--trl", default="default", help="TRL's settings, with commas: default, liger, or rows per micro-batch")
    parser.add_argument("--trl-rows", type=int, default=32, help="rows per micro-batch where --trl gives none")
    parser.add_argument("--out", type=Path, help="folder for trl.json, written after every round; a whole pair is kept")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    if shape := parser.parse_known_args()[0].shape:
        parser.set_defaults(**SHAPES[shape])
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.child:
        ours(args, args.folder) if args.child == "ours" else trl(args, args.folder, args.child.removeprefix("TRL "))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        command = [sys.executable, *sys.argv, "--folder", scratch]
        if args.base.startswith("random:"):
            args.base = str(random_base(args.base.removeprefix("random:"), "auto"))
            command += ["--base", args.base]
        write_inputs(args, folder)
        file = args.out / "trl.json" if args.out else None
        pairs: dict[str, Results] = json.loads(file.read_text())["pairs"] if file and file.exists() else {}

        def keep(how: str, results: Results) -> None:
            pairs[how] = results
            if file:
                file.parent.mkdir(parents=True, exist_ok=True)
                arguments = {name: str(value) for name, value in vars(args).items()}
                file.write_text(json.dumps({"arguments": arguments, "pairs": pairs}, indent=2))

        failed = False
        for how in args.trl.split(","):
            shutil.rmtree(folder / "run", ignore_errors=True)
            try:
                if any(len(runs) < args.repeats for runs in pairs.get(how, {"ours": []}).values()):
                    pair(args, command, how, partial(keep, how))
            except RuntimeError as error:  # too large for the GPU, say: the other settings still count
                print(error, file=sys.stderr, flush=True)
                failed = True
                continue
            print(table(pairs[how]), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
