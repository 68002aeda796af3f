"""Shared by every room: a tiny random base to load, and few threads so that runs beside each other stay fast.

torch and transformers are imported where they are needed: xdist starts its workers once it has imported this file."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before torch is loaded: it would give threads of its own to every thread of Python, and none of those survives a fork. It also
# keeps commands on a CPU from starting a process a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# xdist and readline, which pytest imports, set a width of 80 (the latter behind Python's back): lines would wrap that a pipe gets
# whole, also those of programs that tests start.
os.environ.pop("COLUMNS", None)
os.unsetenv("COLUMNS")

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The same examples every time, so that red means a change made it red. `--hypothesis-profile=new` looks for others.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", deadline=None)
settings.load_profile("same")

# Rooms whose files take a minute or more, first: a file that starts last would keep one worker busy and the others idle.
SLOW = ("vllm", "integration", "tests", "training", "tools", "report", "swap")
# What one worker does: vLLM (which TRL imports too), or a server of processes with all imports, takes ten seconds to be there.
TOGETHER = (
    ("tests/rollout/vllm/", "tests/tools/test_prove.py"),
    ("tests/integration/test_ranks.py", "tests/base/test_sharding.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rooms = {name: place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: rooms.get(item.path.parent.name, len(SLOW)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By file, as `--dist loadfile` does, but for TOGETHER."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((group[0] for group in TOGETHER if nodeid.startswith(group)), super()._split_scope(nodeid))

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


VOCAB = 272  # more rows than the tokenizer has tokens, as real bases have
CONTEXT = 512


def load_tool(name: str) -> ModuleType:
    """A script of tools/ as a module (they are no package), loaded once."""
    return load_file(Path(__file__).resolve().parent.parent / "tools" / f"{name}.py")


def load_file(path: Path) -> ModuleType:
    if path.name not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[path.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path.name])
    return sys.modules[path.name]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, plus ChatML's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    nano = load_tool("make_nano_base")
    tokens = [*nano.SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return nano.chat_tokenizer(tokenizer, CONTEXT)


@pytest.fixture(scope="session")
def tool() -> Callable[[str], ModuleType]:
    return load_tool


@pytest.fixture
def hub() -> Iterator[Any]:
    """A model hub on this machine, for one test."""
    with load_file(Path(__file__).resolve().parent / "registry" / "fake_hub.py").running_hub() as server:
        yield server


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a 2-layer, 64-wide, random fp32 Qwen3 and a byte tokenizer. Read only: copy it to spoil it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tiny-base") / "tiny"
    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,  # sharper than the default: messages differ, and the KL of a step is not negligible
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
