"""Ending a vLLM engine of this process, so that its memory is free for another.

Dropping it is not enough: on a GPU something in the process keeps its objects (vLLM's issue 21073; with 0.26 all its memory
stayed allocated). So its tensors are emptied where they are, and it does not matter who holds them.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from teamtr_lora.rollout.vllm_internals import knows

_allocators: list[Any] = []  # of closed engines: a block that is freed late goes back through the one it came from


def close_engine(engine: Any) -> None:
    """Ends an engine that is awake."""
    from vllm import __version__

    if knows(__version__):
        _let_go(engine)
    engine.engine_core.shutdown()
    if torch.distributed.is_initialized():
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()


def collect() -> None:
    """After the last reference to an engine is gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _let_go(engine: Any) -> None:
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    runner = engine.collective_rpc(lambda worker: worker.model_runner)[0]
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a step may have been scheduled ahead
    if (finalizer := getattr(engine, "_finalizer", None)) is not None:
        finalizer()  # takes vLLM's hooks, and its own hold, off the compiled model
    CUDAGraphWrapper.clear_all_graphs()
    if hasattr(runner, "cudagraph_manager"):
        runner.cudagraph_manager = None
    empty(tensors_of(runner.model))
    if allocator := pool_allocator():
        for pools in allocator.allocator_and_pools.values():  # one pool and its allocator, or a list of them
            _allocators.extend(entry[1] for entry in (pools if isinstance(pools, list) else [pools]))
        gc.unfreeze()  # the collector does not know what it has frozen
        empty(tensors_within({address: data.handle[1] for address, data in allocator.pointer_to_data.items()}))


def pool_allocator() -> Any:
    """vLLM's allocator for memory that can be slept, where an engine has used it in this process."""
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.instance


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and what modules hold besides: adapters and caches."""
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            yield from (item for item in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(item, Tensor))


def tensors_within(sizes: Mapping[int, int]) -> Iterator[Tensor]:
    """Every tensor of the process whose storage begins in one of these pieces of memory, given by address."""
    starts = sorted(sizes)
    # by type, for some objects do things when they are asked for their class
    for tensor in [
        item for item in gc.get_objects() if issubclass(type(item), Tensor) and not issubclass(type(item), FakeTensor)
    ]:
        try:
            address = tensor.untyped_storage().data_ptr()
        except (RuntimeError, ValueError):  # it has none
            continue
        at = bisect_right(starts, address) - 1
        if at >= 0 and address < starts[at] + sizes[starts[at]]:
            yield tensor


def empty(tensors: Iterable[Tensor]) -> None:
    """Gives the memory of these tensors back, and of all that share it."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
