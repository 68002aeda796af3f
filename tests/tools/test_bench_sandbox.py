"""tools/bench_sandbox.py: it measures checks that really judge."""

import sys
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="programs run on Linux only")
def test_every_other_answer_is_right(tool: Callable[[str], ModuleType]) -> None:
    found = tool("bench_sandbox").measure(6)
    assert found["checks"] == 6 and found["right"] == 3 and found["checks_per_second"] > 0
