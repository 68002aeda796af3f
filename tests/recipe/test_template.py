"""The starter that `init` writes: valid, the same every time, a reward that holds, and something that the base can learn."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from teamtr_lora.common.code_paths import load_callable
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import load_recipe
from teamtr_lora.recipe.template import write_starter
from teamtr_lora.training.trainer import TeamTRTrainer

REAL = Path(__file__).resolve().parents[2] / "recipes" / "bases" / "qwen3_1.7b.yaml"
GPU = re.compile(r": \S+ +# GPU: ([^;\n]+).*")  # a value, and the one for a larger base


@pytest.fixture
def starter(tmp_path: Path) -> Path:
    return next(path for path in write_starter(tmp_path / "mine") if path.name == "recipe.yaml")


def test_two_starters_are_the_same_and_none_is_overwritten(starter: Path) -> None:
    again = write_starter(starter.parent.parent / "again")
    assert {path.name for path in again} == {"recipe.yaml", "rewards.py", "questions.jsonl"}
    assert all(path.read_bytes() == (starter.parent / path.name).read_bytes() for path in again)
    with pytest.raises(UserError, match="not empty"):
        write_starter(starter.parent)


def test_its_answers_are_right_and_no_pair_is_in_both_splits(starter: Path) -> None:
    recipe = load_recipe(starter)
    task = recipe.task.build(recipe.folder)
    pairs = {}
    for split in ("train", "test"):
        items = [task.items(split)[i] for i in range(task.items(split).size or 0)]
        numbers = [[int(number) for number in item.prompt.split("+")] for item in items]
        assert [str(sum(pair)) for pair in numbers] == [item.data["answer"] for item in items]
        pairs[split] = {tuple(sorted(pair)) for pair in numbers}
        assert len(pairs[split]) == len(items)
    assert not pairs["train"] & pairs["test"]
    assert len(pairs["test"]) >= recipe.evaluation.items and len(pairs["train"]) >= recipe.rollout.items_per_stage


@pytest.mark.parametrize(
    ("answer", "said", "reward"),
    [
        ("92", ["4+8+0=12", "3+5+1=9"], 1),
        ("125", ["6+9+0=15", "7+4+1=12"], 1),
        ("120", ["5+5+0=10", "6+5+1=12\n"], 1),
        (92, ["4+8+0=12", "3+5+1=9"], 1),  # JSON numbers too
        ("92", ["4+8+0=12", "3+5+0=8"], 0),  # forgot the carry
        ("92", ["4+8+0=13", "3+5+1=9"], 0),
        ("92", ["3+5+1=9", "4+8+0=12"], 0),
        ("92", ["", "3+5+1=92"], 0),  # one agent alone
        ("92", ["4+8+0=12", ""], 0),
        ("92", ["3+5+1=9", "2"], 0),
        ("92", ["92"], 0),
        ("92", ["=2", "=9", "=9"], 0),
        ("92", ["4+8+0=12", "=", "helper: tens"], 0),
        ("92", ["4+8+0=", "3+5+1=x9"], 0),
        ("92", ["4+8+0=١٢", "3+5+1=9"], 0),
        ("92", [], 0),
        ("", [], 0),
        (None, [], 0),
    ],
)
def test_its_reward(starter: Path, answer: Any, said: list[str], reward: float) -> None:
    recipe = load_recipe(starter)
    function = load_callable(recipe.task.reward, key="task.reward", folder=recipe.folder)
    messages = [{"role": "assistant", "name": "helper", "content": text} for text in said]
    right = [{"role": "assistant", "name": "helper", "content": text} for text in ("1+9+0=10", "1+1+1=3")]
    arguments = {"prompts": ["34+58", "11+19"], "completions": [said[-1] if said else "", "1+1+1=3"]}
    assert function(**arguments, messages=[messages, right], answer=[answer, "30"], level=[1, 2]) == [reward, 1]


def test_the_untrained_base_both_succeeds_and_fails_at_the_same_prompt(starter: Path) -> None:
    """Without that no update learns anything: every group of episodes would have one reward."""
    evaluation = TeamTRTrainer.from_recipe(load_recipe(starter)).evaluate(items=16, k=8)
    assert 0.3 < evaluation.avg_at_k < 0.8
    assert evaluation.pass_at_k > 0.8  # most prompts are solved by some of their tries and not by others


def test_the_values_for_a_gpu_are_those_of_the_real_recipes(starter: Path) -> None:
    text = starter.read_text()
    small, real = flat(yaml.safe_load(text)), flat(yaml.safe_load(REAL.read_text()))
    starter.write_text(GPU.sub(r": \1", text))
    large = flat(yaml.safe_load(starter.read_text()))
    changed = {key for key in large if large[key] != small[key]}
    assert len(changed) == text.count("# GPU:") == 7
    assert {key: large[key] for key in changed} == {key: real.get(key) for key in changed}
    assert load_recipe(starter).rollout.engine == "vllm"


def flat(sections: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(sections, dict):
        return {name: sections}
    return {at: value for key in sections for at, value in flat(sections[key], f"{name}.{key}").items()}
