"""Engines that start and end in a third of their time, and leave nothing behind in the process of the tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def threads_as_before() -> Iterator[None]:
    """On a CPU an engine takes torch.set_num_threads away from its process, and lets programs it starts load OpenMP first."""
    preload = os.environ.get("LD_PRELOAD")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", torch.set_num_threads)  # put back afterwards
        yield
    os.environ.pop("LD_PRELOAD", None)
    if preload is not None:
        os.environ["LD_PRELOAD"] = preload


@pytest.fixture(autouse=True)
def one_collection(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """From an engine's start to its end vLLM walks all of Python's objects ten times; here once, after the test. What an engine
    leaves in memory is the subject of test_close_memory.py, where only those that were there before are left out."""
    if request.path.name == "test_close_memory.py":
        gc.freeze()
        yield
        gc.unfreeze()
        return
    skipped: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(gc, "collect", lambda generation=2: skipped.append(generation) or 0)
        yield
    if skipped:
        gc.collect()
