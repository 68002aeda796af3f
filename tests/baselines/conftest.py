"""TRL without vLLM, which it imports where it finds it: that takes longer than everything tested here."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.base.frozen_base import load_tokenizer


@pytest.fixture(scope="session")
def trl() -> Any:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed (tools/setup --test installs it)")
    import trl

    if "trl.generation" not in sys.modules:
        importlib.import_module("trl.import_utils").is_vllm_available = lambda *_, **__: False  # type: ignore[attr-defined]
    return trl


@pytest.fixture(scope="session")
def byte_tokenizer(tiny_base: Path) -> Any:
    return load_tokenizer(tiny_base, "tiny")
