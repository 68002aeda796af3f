"""A small trained run on the tiny base, whose agents have moved far enough from a fresh adapter to be missed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from teamtr_lora.cli import main
from teamtr_lora.recipe import load_recipe
from teamtr_lora.training.trainer import TeamTRTrainer

RECIPE = """
base: {{source: {base}, device: cpu}}
team:
  protocol: {{system: Say something.}}
  agents:
    - {{name: left, role: first, lora: {{rank: 4, alpha: 8.0}}}}
    - {{name: right, role: last, lora: {{rank: 2, alpha: 4.0, targets: [q_proj, v_proj]}}}}
task: {{name: dataset, path: items.jsonl, reward: "rewards:letters"}}
rollout: {{items_per_stage: 8, episodes_per_item: 4, max_message_tokens: 4}}
training: {{stages: 1, learning_rate: 0.01, inner_epochs: 3, order: fixed, tokens_per_microbatch: 1000}}
trust_region: {{kind: none, delta: 0.5}}
evaluation: {{items: 5}}
swap: {{probe_contexts: 16, contexts_per_step: 4, align_steps: 12, align_rate: 0.01}}
diagnostics: {{save_episodes: none}}
"""
REWARD = """
def letters(prompts, completions, **columns):
    return [sum(c.isalpha() for c in text) / 4 for text in completions]
"""


@pytest.fixture(scope="session")
def recipe_file(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swap-recipe")
    (folder / "items.jsonl").write_text("".join(json.dumps({"prompt": f"item {i}"}) + "\n" for i in range(60)))
    (folder / "rewards.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(RECIPE.format(base=tiny_base))
    return folder / "recipe.yaml"


@pytest.fixture(scope="session")
def trained(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swap-run") / "run"
    trainer = TeamTRTrainer.from_recipe(load_recipe(recipe_file, [f"output_dir={folder}"]))
    summary = trainer.train()
    trainer.close()
    assert summary.accepted == 2, "both agents must have moved"
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(scope="session")
def files() -> Callable[[Path], dict[str, bytes]]:
    """Every file of a folder but locks, as bytes."""

    def read(folder: Path) -> dict[str, bytes]:
        found = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
        return {str(p.relative_to(folder)): p.read_bytes() for p in found}

    return read


@pytest.fixture(scope="session")
def without_times() -> Callable[[Any], Any]:
    """JSON without what depends on the moment."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            moment = ("seconds", "start_seconds", "time", "team", "out", "peak_memory_bytes")
            return {k: strip(v) for k, v in value.items() if k not in moment}
        return [strip(v) for v in value] if isinstance(value, list) else value

    return strip


class Killable:
    """A command in a process of its own, forked so that nothing has to be imported again."""

    def __init__(self, arguments: list[str], out: Path) -> None:
        self._out = out
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
                for stream, place in ((1, out), (2, out.with_suffix(".err"))):
                    os.dup2(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
                code = run_to(1, arguments)
            finally:
                os._exit(code)

    def kill_when(self, ready: Callable[[], bool]) -> bool:
        """SIGKILL as soon as it is ready; False if it was over before."""
        deadline = time.monotonic() + 120
        while not ready() and time.monotonic() < deadline:
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                return False
            time.sleep(0.001)
        os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == -signal.SIGKILL

    def result(self) -> Any:
        deadline = time.monotonic() + 120
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                ended = os.waitpid(self.pid, 0)
                break
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(ended[1]) == 0, self._out.with_suffix(".err").read_text()
        return json.loads(self._out.read_text())


def run_to(descriptor: int, arguments: list[str]) -> int:
    import sys

    with os.fdopen(descriptor, "w", closefd=False) as out, os.fdopen(2, "w", closefd=False) as err:
        sys.stdout, sys.stderr = out, err
        return main(arguments)


@pytest.fixture(scope="session")
def killable() -> type[Killable]:
    return Killable
