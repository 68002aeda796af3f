"""Publishing while others publish, and while somebody pulls the plug."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from teamtr_lora.base.versions import version_number
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.locks import locked
from teamtr_lora.registry.identity import protocol_hash
from teamtr_lora.registry.reader import RegistryReader
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.registry.verify import verify

ROUNDS = 5


def publish(registry: Registry, bank: Any, identity: Any, recipe: Any, scale: float) -> None:
    """An adapter, then a team with it: what every command that changes a team does."""
    tensors = {name: tensor * scale for name, tensor in bank.tensors("checker").items()}
    stored = registry.publish_adapter(
        "demo", "checker", tensors, bank.config("checker"), identity=identity, protocol_hash=protocol_hash(recipe.team),
        made_by="swap",
    )  # fmt: skip
    agents = {**registry.team("demo").agents, "checker": stored.version}
    registry.publish_team("demo", recipe, agents, identity=identity, made_by="swap")


def start(work: Callable[[], None]) -> Any:
    """In a process of its own, with everything imported already."""

    def run() -> None:
        torch.set_num_threads(1)
        work()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def test_processes_that_publish_at_once_all_get_their_own_versions(
    filled: Registry, bank: Any, identity: Any, recipe: Any
) -> None:
    def work(seed: int) -> Callable[[], None]:
        def publish_some() -> None:
            for i in range(ROUNDS):
                publish(Registry(filled.root), bank, identity, recipe, 1 + seed + i / 100)

        return publish_some

    processes = [start(work(seed)) for seed in range(3)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    # everyone's work is there, each under its own number
    assert [version_number(name) for name in filled.versions("demo", "checker")] == list(range(1, 3 * ROUNDS + 2))
    assert filled.numbers("demo") == list(range(1, 3 * ROUNDS + 2))
    assert [filled.team("demo", n).parent for n in filled.numbers("demo")] == [None, *range(1, 3 * ROUNDS + 1)]
    assert not verify(filled).problems


def test_a_process_killed_while_it_publishes_leaves_whole_versions_only(
    filled: Registry, bank: Any, identity: Any, recipe: Any
) -> None:
    def forever() -> None:
        while True:
            publish(Registry(filled.root), bank, identity, recipe, random.random())

    first = filled.team("demo")
    generator = random.Random(0)
    killed_inside = rounds = 0
    deadline = time.monotonic() + 60
    while rounds < ROUNDS or (not killed_inside and time.monotonic() < deadline):
        rounds += 1
        process = start(forever)
        before = filled.numbers("demo")[-1]
        while filled.numbers("demo")[-1] == before and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(generator.random() * 0.05)  # somewhere in the next publication
        while rounds % 2 and not any(filled.root.rglob(".tmp-*")) and time.monotonic() < deadline:
            pass  # every other time, right where something is half written
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        killed_inside += any(filled.root.rglob(".tmp-*"))
        reader = RegistryReader(filled.root)
        for agent, version in reader.team("demo").agents.items():
            reader.contents("demo", agent, version)
        assert not verify(filled, "demo").problems
    assert killed_inside, "no kill fell into a publication: the test proves nothing"
    assert filled.team("demo", 1) == first
    publish(filled, bank, identity, recipe, 1.0)  # the next one is not held up, and clears what was left
    assert not any(filled.root.rglob(".tmp-*")) and not verify(filled).problems


def test_a_lock_that_cannot_be_made_is_no_lock_that_somebody_holds(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="cannot be written"), locked(tmp_path / "link", tmp_path, "somebody is here"):
        pass
    assert not (tmp_path / "elsewhere").exists()
    lock = tmp_path / "lock"
    with locked(lock, tmp_path), pytest.raises(UserError, match="somebody is here"), locked(lock, tmp_path, "somebody is here"):
        pass


def test_a_killed_removal_is_finished_by_the_next_writer(filled: Registry, bank: Any, identity: Any, recipe: Any) -> None:
    doomed = filled.root / ".tmp-removed-demo"
    (doomed / "planner").mkdir(parents=True)
    assert not verify(filled).problems and filled.teams() == ["demo"]
    publish(filled, bank, identity, recipe, 1.0)
    assert not doomed.exists()
