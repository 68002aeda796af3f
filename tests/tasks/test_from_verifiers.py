"""The adapter of the docs for environments written for `verifiers`: skipped where that package is not installed."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import teamtr_lora
from teamtr_lora.tasks.machinery.score import play

EXAMPLE = Path(teamtr_lora.__file__).parent / "docs" / "examples" / "from_verifiers.py"


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60


def test_a_taskset_scores_a_team() -> None:
    vf: Any = pytest.importorskip("verifiers.v1", reason="the package verifiers is not installed (pip install verifiers)")
    spec = importlib.util.spec_from_file_location("from_verifiers", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class SumData(vf.TaskData):  # type: ignore[misc]
        answer: str

    class Sum(vf.Task[SumData]):  # type: ignore[misc]
        @vf.reward(weight=0.75)  # type: ignore[untyped-decorator]
        async def right(self, trace: Any) -> float:
            return float(trace.last_reply.endswith(self.data.answer))

        @vf.reward(weight=0.25)  # type: ignore[untyped-decorator]
        async def two_turns(self, trace: Any) -> float:
            return float(trace.num_turns == 2)

    class Sums(vf.Taskset[Sum]):  # type: ignore[misc]
        def load(self) -> Any:
            return [Sum(SumData(prompt=f"{n}+{n}", answer=str(2 * n))) for n in range(10)]

    task = module.FromVerifiers(Sums(vf.TasksetConfig()))
    train, test = task.items("train"), task.items("test")
    assert (train.size, test.size, train[0].prompt) == (8, 2, "2+2")
    episodes = [play(task, train[0], turns) for turns in (["2+2", "=4"], ["=4"], ["=5", "=5"])]
    assert task.score(episodes) == [1.0, 0.75, 0.25]
    voted = play(task, train[0], ["=4", "=5"])
    voted.answer_turn = 0
    assert task.score([voted]) == [1.0]
