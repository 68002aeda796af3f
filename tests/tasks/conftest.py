"""Playing a task by hand, and where the benchmark files are."""

import gzip
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.tasks.machinery.score import play, total_rewards
from teamtr_lora.tasks.machinery.task import Item, Task
from teamtr_lora.team import Episode


@pytest.fixture(scope="session")
def bench_folder() -> Path:
    repo = Path(__file__).resolve().parents[2]
    return Path(os.environ.get("TEAMTR_LORA_BENCH") or repo.parent / "shared" / "bench")


@pytest.fixture(scope="session")
def bench(bench_folder: Path) -> Callable[[str], list[dict[str, Any]]]:
    """The rows of a benchmark file such as gsm8k/test; skips where the files are absent."""

    def rows(name: str) -> list[dict[str, Any]]:
        path = bench_folder / f"{name}.jsonl.gz"
        if not path.is_file():
            pytest.skip(f"no benchmark file {path}; set TEAMTR_LORA_BENCH to the folder that has it")
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    return rows


def rewards(task: Task, pairs: Sequence[tuple[Item, str]]) -> list[float]:
    episodes = [play(task, item, [text]) for item, text in pairs]
    return total_rewards(task, episodes)


@pytest.fixture(scope="session")
def score() -> Callable[[Task, Sequence[tuple[Item, str]]], list[float]]:
    """Rewards of one-message episodes."""
    return rewards


@pytest.fixture(scope="session")
def played() -> Callable[[Task, Item, Sequence[str]], Episode]:
    return play
