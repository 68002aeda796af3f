"""Sharing a GPU with vLLM, with the GPU's numbers made up: when the engine sleeps, wakes, and what it learns from an update."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from teamtr_lora.base import memory
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import RolloutSection
from teamtr_lora.rollout.vllm import start as vllm_start
from teamtr_lora.rollout.vllm.gpu_lending import SharedMemory
from teamtr_lora.rollout.vllm.start import default_environment

GIB = 2**30


class Gpu:
    """What torch.cuda says, and an engine that notes what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, free: int) -> None:
        self.calls: list[str] = []
        self.free, self.allocated, self.peak = free, 0, 0
        fakes: dict[str, Any] = {
            "memory_allocated": lambda device: self.allocated,
            "memory_reserved": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", self.allocated),
            "mem_get_info": lambda device: (self.free, 80 * GIB),
            "empty_cache": lambda: None,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(memory, "_before_reset", {})

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self) -> None:
        self.calls.append("wake")

    def update(self, shared: SharedMemory, needs: int) -> bool:
        """One update that needs so many bytes, and the rollout after it; whether the engine slept."""
        with shared.lent():
            self.peak = max(self.peak, self.allocated + needs)
            slept = shared.asleep
        shared.wake()
        return slept


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch, free=10 * GIB)


def shared(gpu: Gpu, offload: Any, device: str = "cuda") -> SharedMemory:
    return SharedMemory(gpu, torch.device(device), offload, before_sleep=lambda: gpu.calls.append("settle"))


def test_always_and_never(gpu: Gpu) -> None:
    assert [gpu.update(shared(gpu, how), 4 * GIB) for how in ("always", "never")] == [True, False]
    assert gpu.calls == ["settle", "reset", "sleep 1", "wake"], "requests in flight end before the cache is given up"
    assert not gpu.update(shared(gpu, "always", device="cpu"), GIB), "a CPU has nothing to lend"


def test_auto_sleeps_once_and_then_only_where_memory_is_short(gpu: Gpu) -> None:
    memory = shared(gpu, "auto")
    assert gpu.update(memory, 4 * GIB), "what an update needs is not known yet"
    assert not gpu.update(memory, 4 * GIB), "10 GiB are free and 4 were needed"
    gpu.free = 4 * GIB
    assert gpu.update(memory, 4 * GIB), "no room for the margin"


def test_an_update_that_trained_nothing_teaches_nothing(gpu: Gpu) -> None:
    memory = shared(gpu, "auto")
    gpu.free = 2 * GIB
    assert gpu.update(memory, 0)
    assert gpu.update(memory, 8 * GIB), "the skipped update before must not pass for one that needs no memory"


def test_less_than_an_update_tells_nothing_of_one_and_the_model_counts_what_none_has_had_yet(gpu: Gpu) -> None:
    lent = shared(gpu, "auto")
    with lent.lent(measured=False):  # numerical floors: passes over a few messages
        gpu.peak = gpu.allocated + GIB
        assert lent.asleep
    lent.wake()
    assert gpu.update(lent, 2 * GIB), "the first update is the first to be measured"
    assert not gpu.update(lent, 2 * GIB)
    with lent.lent(least=12 * GIB):  # a window that has filled: more messages than any update had
        assert lent.asleep
    lent.wake()
    with lent.lent(least=9 * GIB):
        assert not lent.asleep


def test_measuring_an_update_keeps_the_peak_of_the_run(gpu: Gpu) -> None:
    gpu.peak = 30 * GIB
    gpu.update(shared(gpu, "auto"), 4 * GIB)
    assert memory.peak_memory(torch.device("cuda")) == 30 * GIB


def test_what_the_user_set_stays_and_what_we_set_follows_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_start, "_ours", {})
    for name in default_environment(RolloutSection(), False, torch.float32):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    for gib in (1, 2):
        section = RolloutSection.model_validate({"vllm": {"kv_cache_gib": gib}})
        vllm_start._set_environment(section, on_gpu=False, dtype=torch.float32)
        assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == str(gib)
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG" and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_vllm_is_imported_once_beside_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment is set before the import begins, and whoever needs vLLM waits for the same import."""
    go_on, found = threading.Event(), []

    def import_vllm() -> None:
        found.append(os.environ["VLLM_NO_USAGE_STATS"])
        go_on.wait(60)

    monkeypatch.setattr(vllm_start, "_import", None)
    monkeypatch.setattr(vllm_start, "_import_vllm", import_vllm)
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    begun, again = (vllm_start.begin_import(RolloutSection(), torch.device("cpu"), torch.float32) for _ in range(2))
    assert begun.is_alive() and again is begun
    go_on.set()
    begun.join(60)
    assert found == ["1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_fp32_asks_triton_for_ieee_products(on_gpu: bool, dtype: torch.dtype) -> None:
    wanted = "ieee" if on_gpu and dtype == torch.float32 else None
    assert default_environment(RolloutSection(), on_gpu, dtype).get("TRITON_F32_DEFAULT") == wanted


@pytest.mark.parametrize(("slots", "rank", "ours", "works"), [(4, 64, True, True), (5, 64, True, False), (2, 8, False, False)])
def test_fp32_needs_our_layers(slots: int, rank: int, ours: bool, works: bool) -> None:
    options = {"max_loras": slots, "max_lora_rank": rank}
    with nullcontext() if works else pytest.raises(UserError, match="base.precision=fp16, or rollout.engine=transformers"):
        vllm_start._check_fp32(options, ours)


def test_only_the_first_gpu_of_the_process_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_start.importlib.util, "find_spec", lambda name: object())
    base: Any = SimpleNamespace(device=torch.device("cuda:1"), quantization="none")
    with pytest.raises(UserError, match="base.device=cuda and CUDA_VISIBLE_DEVICES=1"):
        vllm_start.start_engine(base, object(), RolloutSection(), context_tokens=64, lora=True)  # type: ignore[arg-type]


def test_a_cache_of_a_given_size_asks_for_no_share_of_what_is_free() -> None:
    """vLLM refuses to start where its share is not free, also where nothing is taken by it."""
    rollout = RolloutSection.model_validate(
        {"engine": "vllm", "vllm": {"kv_cache_gib": 12, "memory_share": 0.9, "offload": "never"}}
    )
    options = vllm_start._gpu_options(rollout, [])
    assert options["kv_cache_memory_bytes"] == 12 * GIB and options["gpu_memory_utilization"] < 0.02
    shared = RolloutSection.model_validate({"engine": "vllm", "vllm": {"offload": "never"}})
    assert not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & set(vllm_start._gpu_options(shared, []))


@pytest.mark.parametrize("processes", [1, 2])
def test_an_engine_that_is_split_is_vllms_own(monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    """Its workers are processes of their own, which no patch reaches."""
    told: dict[str, Any] = {}

    def start(**options: Any) -> None:
        told.update(options)
        raise ValueError("far enough")

    pytest.importorskip("vllm")
    monkeypatch.setattr("vllm.EngineArgs", start)
    monkeypatch.setattr(vllm_start, "_set_environment", lambda *_: None)
    base: Any = SimpleNamespace(device=torch.device("cpu"), quantization="none", dtype=torch.float32, folder="nowhere")
    rollout = RolloutSection.model_validate({"engine": "vllm", "vllm": {"tensor_parallel": processes}})
    applied: list[Any] = []
    monkeypatch.setattr(vllm_start, "chosen", lambda *_: applied)
    with pytest.raises(UserError, match="did not start: far enough"):
        vllm_start.start_engine(base, object(), rollout, context_tokens=64, lora=False)  # type: ignore[arg-type]
    assert told.get("tensor_parallel_size", 1) == processes
    assert told["distributed_executor_backend"] == ("uni" if processes == 1 else "mp")


@pytest.mark.parametrize("split_base", [False, True])
def test_closing_an_engine_ends_no_process_group_but_its_own(monkeypatch: pytest.MonkeyPatch, split_base: bool) -> None:
    """Processes that split a base have made torch's global group before the engine starts, and train on in it."""
    pytest.importorskip("vllm")
    ended: list[bool] = []
    monkeypatch.setattr("vllm.EngineArgs", lambda **_: None)
    monkeypatch.setattr("vllm.LLMEngine.from_engine_args", lambda _: object())
    monkeypatch.setattr("vllm.distributed.cleanup_dist_env_and_memory", lambda: ended.append(True))
    monkeypatch.setattr(vllm_start, "_set_environment", lambda *_: None)
    monkeypatch.setattr(vllm_start, "chosen", lambda *_: [])
    base: Any = SimpleNamespace(device=torch.device("cpu"), quantization="none", dtype=torch.float32, folder="nowhere")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: split_base)
    parts = vllm_start.start_engine(base, object(), RolloutSection(), context_tokens=64, lora=False)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    vllm_start.close_engine(parts)
    assert bool(ended) is not split_base


def test_an_engine_that_failed_while_it_went_to_sleep_is_woken(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(level: int) -> None:
        raise RuntimeError("Memory usage increased after sleeping")

    memory = shared(gpu, "always")
    monkeypatch.setattr(gpu, "sleep", fails)
    with pytest.raises(RuntimeError, match="after sleeping"), memory.lent():
        pass
    memory.wake()
    assert gpu.calls[-1] == "wake" and not memory.asleep
