"""Engines that start and end in a third of their time."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def one_collection(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """From an engine's start to its end vLLM walks all of Python's objects ten times; here once, after the test. What an engine
    leaves in memory is the subject of test_close_memory.py, where nothing is changed."""
    if request.path.name == "test_close_memory.py":
        yield
        return
    skipped: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(gc, "collect", lambda generation=2: skipped.append(generation) or 0)
        yield
    if skipped:
        gc.collect()
