"""How many AutoLogi checks a second the sandbox runs, on generated puzzles with right and wrong answers.

.venv/bin/python tools/bench_sandbox.py [--checks 10000] [--json]
"""

from __future__ import annotations

import argparse
import json
import time

from teamtr_lora.tasks.benchmarks.autologi import AutoLogi
from teamtr_lora.tasks.machinery.score import play


def measure(checks: int) -> dict[str, float]:
    task = AutoLogi(4)
    items = task.items("train")
    episodes = []
    for position in range(checks):
        item = items[position]
        answer = item.data["example"] if position % 2 else []
        episodes.append(play(task, item, [f"```json\n{json.dumps(answer)}\n```"]))
    started = time.perf_counter()
    rewards = task.score(episodes)
    seconds = time.perf_counter() - started
    return {"checks": checks, "right": sum(rewards), "seconds": seconds, "checks_per_second": checks / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description="How many AutoLogi checks a second the sandbox runs.")
    parser.add_argument("--checks", type=int, default=10_000, help="how many (default: 10000)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    found = measure(args.checks)
    if args.json:
        print(json.dumps(found))
    else:
        print(f"{found['checks']} checks in {found['seconds']:.1f} s: {found['checks_per_second']:.0f} a second")


if __name__ == "__main__":
    main()
