"""Patch `close_memory`: giving a closed engine's memory back, whoever holds its tensors."""

from __future__ import annotations

import gc
import importlib.util
import logging
import weakref
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch._subclasses import FakeTensorMode

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import load_base
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import LoraSection, RolloutSection
from teamtr_lora.rollout.sampler import Request, SamplingParams
from teamtr_lora.rollout.vllm import start as vllm_start
from teamtr_lora.rollout.vllm.engine import VllmSampler
from teamtr_lora.rollout.vllm.patches import close_memory
from teamtr_lora.rollout.vllm.patches.close_memory import clear_frames_with, empty, tensors_of, tensors_within


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_tensors_in_a_piece_of_memory_are_found_and_no_others() -> None:
    pool, other = torch.ones(4, 100), torch.ones(100)
    views = [pool[2], pool.view(2, 200)]
    with FakeTensorMode():
        fake = torch.ones(3)
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True)
    start = pool.untyped_storage().data_ptr()
    found = {id(tensor) for tensor in tensors_within({start: bytes_of(pool), start + 10**9: 8})}
    assert found == {id(tensor) for tensor in (pool, *views)}
    beside = {id(tensor) for tensor in tensors_within({start - 4096: 4096})}  # where tensors of other tests may lie
    assert not [*tensors_within({})] and not found & beside
    empty(tensors_within({start: bytes_of(pool)}))
    assert bytes_of(views[0]) == bytes_of(pool) == 0
    assert other.sum() == 100 and fake.shape == (3,) and sparse.to_dense()[0] == 1


def test_a_models_tensors_are_its_parameters_buffers_and_what_its_modules_hold() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    model[0].kv_cache = [torch.ones(5)]
    model[1].joined = torch.ones(6)
    before = [*model.parameters(), *model.buffers(), *model[0].kv_cache, model[1].joined]
    assert {id(t) for t in tensors_of(model)} == {id(t) for t in before}
    empty(tensors_of(model))
    assert not any(bytes_of(tensor) for tensor in before)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (tools/setup --all installs it)")
def test_a_closed_engine_keeps_no_memory_though_its_tensors_are_held() -> None:
    base = load_base("nano")  # on the GPU where there is one
    bank = AdapterBank(base.model, {"a": LoraSection(rank=4)}, base_name="nano", seed=0)
    weights = {name: tensor.clone() for name, tensor in base.model.state_dict().items()}
    said = []
    for _ in range(2):  # and another one can be opened, which shares nothing with it
        sampler = VllmSampler(base, bank, RolloutSection(engine="vllm", requests_per_batch=4), context_tokens=64)
        sampler.publish(bank.version("a"))
        runner = sampler.parts.engine.collective_rpc(lambda worker: worker.model_runner)[0]
        sampler.submit(Request([1, 80, 70, 90, 75], "a", SamplingParams(0.0, 8, ()), 0))
        said += [(done.token_ids, done.logprobs) for done in sampler.poll()]
        held = [*tensors_of(runner.model), *runner.kv_caches]
        assert sum(map(bytes_of, held)) > 2**20
        sampler.close()
        assert not any(bytes_of(tensor) for tensor in held)
        sampler.close()
    assert said[0] == said[1] and len(said[0][0]) == 8
    assert all(torch.equal(tensor, weights[name]) for name, tensor in base.model.state_dict().items())


class Allocator:
    def __init__(self, usage: int) -> None:
        self.usage = usage

    def get_current_usage(self) -> int:
        return self.usage


@pytest.mark.parametrize("offload", ["auto", "never", "always"])
@pytest.mark.parametrize("usage", [None, 0, 7])
def test_an_engine_sleeps_only_where_none_before_it_left_memory(
    offload: Any, usage: int | None, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(close_memory, "pool_allocator", lambda: None if usage is None else Allocator(usage))
    left = close_memory.memory_left()
    assert left == bool(usage)
    if left and offload == "always":
        with pytest.raises(UserError, match="start a new process"):
            vllm_start._can_sleep(offload, left)
        return
    with caplog.at_level(logging.WARNING):
        assert vllm_start._can_sleep(offload, left) == (offload != "never" and not left)
    assert ("cannot sleep" in caplog.text) == (offload == "auto" and left)


class Engine:
    """What a test needs of one: how many there are is known by weak references."""


def keep_an_error(engine: Engine, other: object) -> ImportError:
    """An error caught below the call that has the engine, as a library keeps one of an optional import."""

    def around() -> ImportError:
        try:
            raise ImportError("no such module")
        except ImportError as error:
            return error

    return around()


def test_a_kept_error_no_longer_holds_the_engine() -> None:
    engine, other = Engine(), Engine()
    kept = keep_an_error(engine, other)
    unrelated = keep_an_error(other, other)
    seen, others = weakref.ref(engine), weakref.ref(other)
    del engine, other
    assert seen() is not None and others() is not None
    clear_frames_with([seen()])
    gc.collect()
    assert seen() is None and others() is not None, "the other error's frames are somebody else's"
    assert kept.__traceback__ is not None and unrelated.__traceback__ is not None


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (tools/setup --all installs it)")
def test_free_pieces_of_the_pools_are_given_back_once_and_used_ones_kept(monkeypatch: Any) -> None:
    """Against an allocator as vLLM's: one piece was given back before (the pool does not know), one is asleep, one in use."""
    given_back: list[int] = []
    monkeypatch.setattr("vllm.device_allocator.cumem.unmap_and_release", given_back.append)

    class Pools:
        pointer_to_data: ClassVar = {
            address: SimpleNamespace(handle=(0, 16, address), is_asleep=address == 3) for address in (1, 3, 4)
        }
        allocator_and_pools: ClassVar = {"weights": None}

        def _python_free_callback(self, address: int) -> int:
            del self.pointer_to_data[address]
            return address

    class Pool:
        def snapshot(self) -> list[dict[str, int]]:
            return [{"address": address, "allocated_size": 8 * (address == 4)} for address in (1, 2, 3, 4)]

    pools = Pools()
    pools.allocator_and_pools["weights"] = (Pool(), "allocator")
    close_memory._empty_pool(pools)
    assert given_back == [1] and [*pools.pointer_to_data] == [4] and close_memory._allocators.pop() == "allocator"


def test_a_close_that_fails_still_ends_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: calls.append("shutdown")))
    with caplog.at_level(logging.WARNING):
        close_memory.free_engine(engine)
    assert calls == ["shutdown"] and "may stay" in caplog.text
