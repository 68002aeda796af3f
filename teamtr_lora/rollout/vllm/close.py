"""Ending a vLLM engine of this process, so that its memory is free for another.

vLLM's own shutdown is not enough on a GPU: something in the process keeps the engine's objects (vLLM's issue 21073; with 0.26 all
its memory stayed allocated, and no second engine could start). Errors of optional imports can: they keep the frames they rose in,
and those the engine that was being made. So known holds are let go of, and the tensors are emptied where they are: then it does
not matter who else has them.
"""

from __future__ import annotations

import gc
import inspect
import logging
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from teamtr_lora.rollout.vllm.internals import knows

logger = logging.getLogger(__name__)

_allocators: list[Any] = []  # of closed engines: a block that is freed late goes back through the one it came from
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def close_engine(engine: Any) -> None:
    from vllm import __version__

    if knows(__version__):
        try:
            _let_go(engine)
        except Exception:  # what was trained is stored: nothing here is worth an error
            logger.warning("memory of the closed vLLM engine may stay with this process", exc_info=True)
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
    core = engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    runner = worker.model_runner
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a step may have been scheduled ahead
    if (finalizer := getattr(engine, "_finalizer", None)) is not None:
        finalizer()  # takes vLLM's hooks, and its own hold, off the compiled model
    _drop_graphs(runner)
    _forget_addresses()
    gc.unfreeze()  # the collector does not know what it has frozen
    clear_frames_with([engine, engine.engine_core, core, core.model_executor, worker, runner, runner.model])
    empty(tensors_of(runner.model))
    if allocator := pool_allocator():
        _empty_pool(allocator)


def _drop_graphs(runner: Any) -> None:
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.platforms import current_platform

    CUDAGraphWrapper.clear_all_graphs()
    if (manager := getattr(runner, "cudagraph_manager", None)) is not None:
        getattr(manager, "graphs", {}).clear()
        runner.cudagraph_manager = None
    type(current_platform)._global_graph_pool = None  # torch captures no graph into a pool whose last one is gone
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()  # they may lie in one of the pools


def _forget_addresses() -> None:
    """vLLM's tables of adapters by address: memory that is free again comes back under the same one."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("vllm.lora.ops.triton_ops."):
            for table in [value for key, value in vars(module).items() if key.endswith("_PTR_DICT")]:
                table.clear()


def clear_frames_with(objects: Iterable[Any]) -> None:
    """Takes their variables from finished calls that kept errors remember, where one of these objects is among them."""
    ids = {id(item) for item in objects}
    for error in [item for item in gc.get_objects() if issubclass(type(item), BaseException)]:
        for frame in _frames(error):
            if not frame.f_code.co_flags & _SUSPENDS and any(id(value) in ids for value in gc.get_referents(frame)):
                with suppress(RuntimeError):  # it still runs
                    frame.clear()


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Of the calls from where it rose up to where it was caught, and of those around them."""
    step = error.__traceback__
    frame = step.tb_frame.f_back if step else None
    while step is not None:
        yield step.tb_frame
        step = step.tb_next
    while frame is not None:
        yield frame
        frame = frame.f_back


def pool_allocator() -> Any:
    """vLLM's allocator for memory that can be slept, where an engine has used it in this process."""
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.instance


def _empty_pool(allocator: Any) -> None:
    """Frees what lies in the allocator's pools and gives the free pieces back one by one, as vLLM does itself: left to the pools'
    end, a piece that vLLM gave back before would keep the others from it."""
    from vllm.device_allocator.cumem import unmap_and_release

    empty(tensors_within({address: data.handle[1] for address, data in allocator.pointer_to_data.items()}))
    for pools in allocator.allocator_and_pools.values():
        for pool, pluggable in pools if isinstance(pools, list) else [pools]:
            _allocators.append(pluggable)
            for piece in pool.snapshot():
                data = allocator.pointer_to_data.get(piece["address"])
                if data is not None and not piece["allocated_size"]:
                    asleep = data.is_asleep  # then it has been given back already
                    handle = allocator._python_free_callback(piece["address"])
                    if not asleep:
                        unmap_and_release(handle)


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
        except Exception:  # somebody's own kind of tensor, which has none
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
