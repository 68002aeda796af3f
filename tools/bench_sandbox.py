"""How many AutoLogi checks a second the sandbox runs, on generated puzzles with right and wrong answers.

python tools/bench_sandbox.py                        # 10,000 checks
python tools/bench_sandbox.py --against ../earlier   # with another checkout's sandbox too, and the ratio
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def seconds_of(checks: int) -> float:
    from teamtr_lora.tasks.benchmarks.autologi import AutoLogi
    from teamtr_lora.tasks.machinery.score import play

    task = AutoLogi(4)
    items = task.items("train")
    episodes = []
    for position in range(checks):
        answer = items[position].data["example"] if position % 2 else []
        episodes.append(play(task, items[position], [f"```json\n{json.dumps(answer)}\n```"]))
    started = time.perf_counter()
    assert sum(task.score(episodes)) == checks // 2
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description="How many AutoLogi checks a second the sandbox runs.")
    parser.add_argument("--checks", type=int, default=10_000, help="how many (default: 10000)")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout of the project, to compare with")
    parser.add_argument("--bare", action="store_true", help="print the seconds and nothing else")
    args = parser.parse_args()
    if args.bare:
        print(seconds_of(args.checks))
        return
    here = Path(__file__).resolve().parent.parent
    took: list[float] = []
    for folder in [here] if args.against is None else [args.against, here]:
        command = [sys.executable, __file__, "--bare", "--checks", str(args.checks)]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(folder)}, check=True, stdout=subprocess.PIPE)
        took.append(float(done.stdout))
        print(f"{folder}: {args.checks} checks in {took[-1]:.1f} s, {args.checks / took[-1]:.0f} a second", flush=True)
    if args.against is not None:
        print(f"this one takes {took[1] / took[0]:.2f} times as long")


if __name__ == "__main__":
    main()
