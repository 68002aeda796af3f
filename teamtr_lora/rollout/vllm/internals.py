"""What touches vLLM's internals to put adapters in place, for the versions in KNOWN; with any other the engine keeps to public
calls. (Requests are the affair of vllm_queue.py, the adapters' arithmetic that of vllm_lora.py.)

- `SlotWriter`: adapters from memory. vLLM loads them from a folder, through CPU memory, one small copy per layer; ours are
  already on the device, so publishing is a few grouped copies into the buffers its LoRA kernels read, and an entry in its books.
- On a GPU, each step's map from tokens to slots is made on the CPU: vLLM asks the GPU for it, and so waits for the step before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from teamtr_lora.common.errors import UserError

KNOWN = ("0.26", "0.32")


def knows(version: str) -> bool:
    return ".".join(version.split(".")[:2]) in KNOWN


class SlotWriter:
    """Writes adapters into the LoRA slots of an engine that runs in this process."""

    def __init__(self, engine: Any) -> None:
        runner = engine.collective_rpc(lambda worker: worker.model_runner)[0]
        self._manager = runner.lora_manager._adapter_manager
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        if mapper is not None:  # fused names (qkv_proj) are the engine's own affair: see `_parts`
            mapper = mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()
        self._mapper = mapper
        self._parts = self._find_parts()
        wrappers = list(self._manager.punica_wrapper_mapping.values())
        on_gpu = next(iter(self._parts.values()))[0].is_cuda
        if on_gpu and hasattr(runner, "lora_state") and len(wrappers) == 1:
            _map_tokens_on_cpu(runner, self._manager, wrappers[0])
        self._plans: dict[tuple[int, ...], list[_Plan]] = {}

    def put(self, lora_id: int, tensors: Mapping[str, Tensor], *, rank: int, scaling: float) -> None:
        """Makes `tensors` (PEFT names) the adapter `lora_id`. Returns when the device has it."""
        manager = self._manager
        if None not in manager.lora_index_to_id:
            raise RuntimeError(f"no free LoRA slot for adapter {lora_id}: {manager.lora_index_to_id}")
        slot = manager.lora_index_to_id.index(None)
        plan = self._plan(slot, tensors)
        if plan.rest:
            torch._foreach_zero_(plan.rest)
        torch._foreach_copy_(plan.into_a, plan.a)
        torch._foreach_copy_(plan.into_b, torch._foreach_mul(plan.b, scaling))
        if plan.into_a[0].is_cuda:
            torch.cuda.synchronize(plan.into_a[0].device)
        manager._registered_adapters[lora_id] = _in_slot(lora_id, rank)
        manager._active_adapters[lora_id] = None
        manager.lora_index_to_id[slot] = lora_id
        manager.pin_adapter(lora_id)  # in neither of vLLM's caches does a live adapter make room for another

    def drop(self, lora_id: int) -> None:
        self._manager.remove_adapter(lora_id)

    def registered(self) -> set[int]:
        return set(self._manager.list_adapters())

    def _plan(self, slot: int, tensors: Mapping[str, Tensor]) -> _Plan:
        """Where each tensor goes. The trainer updates its adapters in place, so this is found once per agent, for all slots."""
        key = tuple(tensor.data_ptr() for tensor in tensors.values())
        if key not in self._plans:
            if len(self._plans) > 64:
                self._plans.clear()
            self._plans[key] = [self._make_plan(each, tensors) for each in range(len(self._manager.lora_index_to_id))]
        return self._plans[key][slot]

    def _make_plan(self, slot: int, tensors: Mapping[str, Tensor]) -> _Plan:
        from vllm.lora.utils import parse_fine_tuned_lora_name

        rest = {(module, is_a): pair[1 - is_a][slot, 0] for module, pair in self._parts.items() for is_a in (True, False)}
        plan = _Plan(rest=[], a=[], into_a=[], b=[], into_b=[])
        for name, tensor in tensors.items():
            module, is_a = parse_fine_tuned_lora_name(name, self._mapper)
            if module not in self._parts:
                raise UserError(f"lora.targets: vLLM has no LoRA layer for {name} on this base; leave that module out")
            target = self._parts[module][0 if is_a else 1][slot, 0]
            rows, columns = tensor.shape
            fits = (rows <= target.shape[0] and columns == target.shape[1]) if is_a else (
                rows == target.shape[0] and columns <= target.shape[1]
            )  # fmt: skip
            if not fits:
                raise ValueError(f"{name} is {tuple(tensor.shape)}, vLLM's buffer for it {tuple(target.shape)}")
            (plan.a if is_a else plan.b).append(tensor)
            (plan.into_a if is_a else plan.into_b).append(target[:rows, :columns])
            if target.shape == tensor.shape:
                del rest[module, is_a]
        plan.rest.extend(rest.values())
        return plan

    def _find_parts(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The stacked buffers [slot, 1, rank, in] and [slot, 1, out, rank] by the name of the unfused module."""
        parts: dict[str, tuple[Tensor, Tensor]] = {}
        for name, module in self._manager.modules.items():
            if not hasattr(module, "lora_a_stacked") or not hasattr(module, "lora_b_stacked"):
                raise RuntimeError(f"LoRA layer {name} ({type(module).__name__}) keeps its weights in another way")
            names = self._manager.packed_modules.get(name, [name])
            a, b = module.lora_a_stacked, module.lora_b_stacked
            a, b = (a, b) if isinstance(a, (tuple, list)) else ((a,), (b,))
            if not len(names) == len(a) == len(b):
                raise RuntimeError(f"LoRA layer {name} has {len(a)} parts for {len(names)} modules")
            parts |= {part: (a[i], b[i]) for i, part in enumerate(names)}
        return parts


@dataclass
class _Plan:
    rest: list[Tensor]  # buffers of the slot that no tensor fills: zeroed first, so that nothing of the adapter before stays
    a: list[Tensor]
    into_a: list[Tensor]
    b: list[Tensor]
    into_b: list[Tensor]


def _in_slot(lora_id: int, rank: int) -> Any:
    """The engine's record of an adapter whose weights are in its slot and nowhere else.

    If vLLM ever dropped it from the slot and looked for weights to put back, it must not find none and serve the base instead.
    """
    from vllm.lora.lora_model import LoRAModel

    class InSlot(LoRAModel):
        def get_lora(self, module_name: str) -> Any:
            raise RuntimeError(f"adapter {self.id} was dropped from its slot; publish it again")

    return InSlot(lora_id, rank, {})


def slot_map(slot_T: np.ndarray, slots: int) -> np.ndarray:
    """What vLLM's LoRA kernels want to know of a batch, in one array: the slot of each token (-1: none), the tokens sorted by
    slot, then, padded to slots + 1 each, the slots present, their token counts, and (slots + 2) where each one's tokens start."""
    present, counts = np.unique(slot_T, return_counts=True)
    tail = np.zeros(3 * (slots + 1) + 1, dtype=np.int32)
    tail[: slots + 1] = -1
    tail[: len(present)] = present
    tail[slots + 1 : slots + 1 + len(present)] = counts
    tail[2 * (slots + 1) + 1 : 2 * (slots + 1) + 1 + len(present)] = np.cumsum(counts)
    return np.concatenate([slot_T.astype(np.int32), np.argsort(slot_T, kind="stable").astype(np.int32), tail])


def fill_kernel_meta(meta: Any, packed: Tensor, tokens: int, slots: int) -> None:
    """Puts a `slot_map` that is on the device where the kernels, and the graphs that captured them, look for it."""
    meta.token_lora_mapping[:tokens].copy_(packed[:tokens])
    meta.token_indices_sorted_by_lora_ids[:tokens].copy_(packed[tokens : 2 * tokens])
    tail, width = packed[2 * tokens :], slots + 1
    meta.active_lora_ids.copy_(tail[:width])
    meta.num_tokens_per_lora.copy_(tail[width : 2 * width])
    meta.lora_token_start_loc.copy_(tail[2 * width :])


def _map_tokens_on_cpu(runner: Any, manager: Any, wrapper: Any) -> None:
    """Replaces what vLLM does before every step: it builds the map on the GPU, where counting the slots waits for all work queued
    there. The requests' slots are known here. Adapters are pinned in their slots, so none needs loading either."""
    state, theirs = runner.lora_state, runner._set_active_loras
    device, slots, meta = manager.device, manager.lora_slots, wrapper.token_mapping_meta
    last: list[np.ndarray] = []

    def active(req_ids: list[str]) -> list[Any]:
        return list({id(lora): lora for lora in map(state.lora_requests.get, req_ids) if lora is not None}.values())

    def inputs(req_ids: list[str], idx_mapping: np.ndarray, num_scheduled_tokens: np.ndarray) -> tuple[Any, ...]:
        return state.lora_ids[idx_mapping], num_scheduled_tokens, req_ids

    def set_active(ids_R: Any, tokens_R: Any, which: Any, *rest: Any) -> None:
        if not isinstance(ids_R, np.ndarray):  # a dummy run of vLLM's own
            last.clear()
            theirs(ids_R, tokens_R, which, *rest)
            return
        table = np.array([lora_id or 0 for lora_id in manager.lora_index_to_id])
        slot_R = np.where(ids_R > 0, (ids_R[:, None] == table[None, :]).argmax(1), -1)
        if np.any((ids_R > 0) & (table[slot_R] != ids_R)):
            raise RuntimeError(
                f"a request names an adapter that is in no slot: {sorted(set(ids_R.tolist()) - set(table.tolist()))}"
            )
        if last and np.array_equal(last[0], slot_R) and np.array_equal(last[1], tokens_R):
            return
        last[:] = [slot_R, tokens_R.copy()]
        slot_T = slot_R.repeat(tokens_R)
        if hasattr(wrapper, "choose"):
            wrapper.choose(torch.from_numpy(slot_T).pin_memory().to(device, non_blocking=True))
            return
        packed = torch.from_numpy(slot_map(slot_T, slots)).pin_memory().to(device, non_blocking=True)
        fill_kernel_meta(meta, packed, len(slot_T), slots)
        meta.no_lora_flag_cpu[0] = bool((slot_T < 0).all())
        count = len(np.unique(slot_R))
        meta.num_active_loras_cpu[0] = next((c for c in meta.captured_lora_counts if c >= count), count)
        wrapper.is_prefill = True

    state.get_activate_loras, state.make_lora_inputs, runner._set_active_loras = active, inputs, set_active
