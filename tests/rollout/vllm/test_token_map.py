"""Patch `token_map`: the map from tokens to adapter slots that replaces vLLM's own before every step on a GPU."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from teamtr_lora.rollout.vllm.patches.token_map import fill_kernel_meta, map_tokens_on_cpu, slot_map


class Wrapper:
    token_mapping_meta = None

    def __init__(self) -> None:
        self.chosen: list[list[int]] = []

    def choose(self, slot_T: torch.Tensor) -> None:
        self.chosen.append(slot_T.tolist())


class Engine:
    """Requests 0 to 3 with the adapters 7, none, 9 and 7; adapter 7 is in slot 1 and 9 in slot 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # there may be no GPU to pin it for
        self.vllms_own: list[Any] = []
        self.wrapper = Wrapper()
        self.loras = {"r0": SimpleNamespace(lora_int_id=7), "r2": SimpleNamespace(lora_int_id=9)}
        self.state = SimpleNamespace(lora_ids=np.array([7, 0, 9, 7]), lora_requests=self.loras | {"r3": self.loras["r0"]})
        self.runner = SimpleNamespace(lora_state=self.state, _set_active_loras=lambda *args: self.vllms_own.append(args))
        self.manager = SimpleNamespace(device="cpu", lora_slots=3, lora_index_to_id=[9, 7, None])
        map_tokens_on_cpu(self.runner, self.manager, self.wrapper)

    def step(self, requests: list[int], tokens: list[int]) -> list[list[int]]:
        names = [f"r{i}" for i in requests]
        self.runner._set_active_loras(*self.state.make_lora_inputs(names, np.array(requests), np.array(tokens)))
        chosen, self.wrapper.chosen = self.wrapper.chosen, []
        return chosen


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_each_token_has_its_requests_slot(engine: Engine) -> None:
    assert engine.step([2, 0, 1], [1, 3, 2]) == [[0, 1, 1, 1, -1, -1]]
    assert engine.state.get_activate_loras(["r0", "r1", "r2", "r3"]) == [engine.loras["r0"], engine.loras["r2"]]


def test_a_step_like_the_last_one_writes_nothing_and_any_other_does(engine: Engine) -> None:
    assert engine.step([0, 2], [1, 1]) == [[1, 0]]
    assert engine.step([3, 2], [1, 1]) == [], "another request of the same adapter"
    assert engine.step([2, 0], [1, 1]) == [[0, 1]]
    assert engine.step([2, 0], [1, 2]) == [[0, 1, 1]]
    engine.manager.lora_index_to_id = [9, None, 7]
    assert engine.step([2, 0], [1, 2]) == [[0, 2, 2]], "the adapter was published anew, into another slot"


def test_after_a_dummy_run_of_vllms_own_everything_is_written_again(engine: Engine) -> None:
    engine.step([0], [1])
    engine.runner._set_active_loras((1, 2), (3,), {"dummy"}, 0)
    assert engine.vllms_own == [((1, 2), (3,), {"dummy"}, 0)]
    assert engine.step([0], [1]) == [[1]]


def test_an_adapter_that_is_in_no_slot_is_an_error(engine: Engine) -> None:
    engine.manager.lora_index_to_id = [9, None, None]
    with pytest.raises(RuntimeError, match=r"an adapter that is in no slot: \[7\]"):
        engine.step([0, 2], [1, 1])


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("seed", range(20))
def test_the_slot_map_is_what_vllm_computes_on_the_gpu(seed: int) -> None:
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    rng = np.random.default_rng(seed)
    slots, tokens = int(rng.integers(1, 9)), int(rng.integers(1, 200))
    slot_T = rng.integers(-1, slots, tokens)
    theirs, ours = (LoRAKernelMeta.make(slots, 256, "cpu") for _ in range(2))
    if (slot_T >= 0).any():
        theirs.prepare_tensors(torch.from_numpy(slot_T))
        fill_kernel_meta(ours, torch.from_numpy(slot_map(slot_T, slots)), tokens, slots)
        for field in ("token_lora_mapping", "token_indices_sorted_by_lora_ids"):
            assert getattr(ours, field)[:tokens].tolist() == getattr(theirs, field)[:tokens].tolist(), field
        for field in ("active_lora_ids", "num_tokens_per_lora", "lora_token_start_loc"):
            assert getattr(ours, field).tolist() == getattr(theirs, field).tolist(), field
