"""How long a run takes from the command to its first rollout, started several times on one machine.

    python tools/bench_start.py                                                      # the embedded base, seconds, on a CPU
    python tools/bench_start.py --base random:qwen3-1.7b --engine vllm --prompts 32 --group 8 --message-tokens 256 --repeats 2

The first start also fills the caches that later ones find: what vLLM has compiled for a base, and the hash of its files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from update_shapes import add_update_options, random_base, update_recipe

from teamtr_lora.runs.metrics import StageRow, read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_update_options(parser, memory_share=0.3)
    args = parser.parse_args()
    if args.base.startswith("random:"):
        args.base = str(random_base(args.base.removeprefix("random:"), "auto"))
    recipe = update_recipe(args, agents=1, prompts=args.prompts, tokens=args.message_tokens)
    recipe |= {"task": {"name": "letter_count"}, "evaluation": {"items": 8}}
    recipe["training"] |= {"stages": 1}
    for number in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            phases = start(Path(folder), recipe, args.settings)
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
        print(f"start {number + 1}: {parts} s", flush=True)


def start(folder: Path, recipe: dict[str, object], settings: list[str]) -> dict[str, float]:
    """Seconds by phase as the run tells them, their sum until the first rollout, and a clock's until its first row."""
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    command = [
        sys.executable,
        "-m",
        "teamtr_lora",
        "train",
        str(folder / "recipe.yaml"),
        *settings,
        "--run-dir",
        str(folder / "run"),
    ]
    began = time.time()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
        while run.poll() is None and not any(isinstance(row, StageRow) for row in rows_of(folder / "run")):
            time.sleep(0.2)
        run.terminate()
    first = next((row for row in rows_of(folder / "run") if isinstance(row, StageRow)), None)
    if first is None or first.start_seconds is None:
        sys.exit(f"the run ended with exit status {run.returncode} before its first row")
    opened = sum(first.start_seconds[phase] for phase in ("process", "base", "adapters", "engine"))
    return first.start_seconds | {"first rollout": opened, "with its evaluation and floors": first.time - began}


def rows_of(run: Path) -> list[object]:
    return list(read_rows(run)) if (run / "metrics.jsonl").exists() else []


if __name__ == "__main__":
    main()
