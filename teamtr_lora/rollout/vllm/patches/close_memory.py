"""Patch `close_memory`: a closed engine's memory is free for another one in the same process.

Replaces: leaving an engine to Python's garbage collector.
Why: on a GPU that is not enough. Something in the process keeps the engine's objects (vLLM's issue 21073; with 0.26 all its
memory stayed allocated, and no second engine could start). Errors of optional imports are one such thing: a library keeps the
error, the error the frames of the calls it passed through, and those the engine that was being made. So vLLM's worker modules are
imported in a thread of their own, frames that hold the engine are cleared, and the engine's tensors are emptied where they are:
then it does not matter who else has them.
Worth: a second engine starts at all, in 18 s (the first, not yet compiled, in 76 s); each leaves 0.29 GiB when closed (random
Qwen3-1.7B, one H200), by `tools/bench_rollout.py --base random:qwen3-1.7b --episodes 256 --parts again`. Without any
patch 42 GiB stayed: the row `none` of the same with `--parts patches`.
Knows: vLLM 0.26 and 0.32.
Other versions: the engine is dropped, collected, and its process group cleaned up by vLLM's public function; on a GPU its memory
may stay allocated until the process ends.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from teamtr_lora.rollout.vllm.patches.patch import Patch
from teamtr_lora.rollout.vllm.public_interface import EngineParts

logger = logging.getLogger(__name__)

# Those of closed engines: a block of memory that is freed late goes back through the allocator it came from.
_allocators: list[Any] = []
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def import_workers(options: dict[str, Any]) -> AbstractContextManager[None]:
    """Imports what an engine on a GPU imports while it starts."""

    def work() -> None:
        for name in ("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner"):
            with suppress(ImportError):  # if it matters, the engine's start will say it
                importlib.import_module(name)

    if torch.cuda.is_available():
        in_own_thread(work)
    return nullcontext()


def in_own_thread(work: Callable[[], None]) -> None:
    """For imports: libraries keep errors of optional ones, and such an error keeps the frames of the calls it passed through.
    Those of another thread hold neither our base nor the engine."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def free_engine(engine: Any) -> None:
    """Frees the engine's memory and shuts its core down; never raises, since what was trained is stored by now."""
    try:
        _let_go(engine)
    except Exception:
        logger.warning("memory of the closed vLLM engine may stay with this process", exc_info=True)
    engine.engine_core.shutdown()


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
    gc.unfreeze()  # gc.get_objects leaves out what is frozen
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
    """Clears vLLM's tables of adapters by address: another engine's memory may come to lie at the same addresses."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("vllm.lora.ops.triton_ops."):
            for table in [value for key, value in vars(module).items() if key.endswith("_PTR_DICT")]:
                table.clear()


def clear_frames_with(objects: Iterable[Any]) -> None:
    """Clears the local variables of finished calls that kept errors remember, where one of these objects is among them."""
    wanted = list(objects)
    for error in [item for item in gc.get_objects() if issubclass(type(item), BaseException)]:
        for frame in _frames(error):
            if not frame.f_code.co_flags & _SUSPENDS and _holds_any(frame, wanted):
                with suppress(RuntimeError):  # it still runs
                    frame.clear()


def _holds_any(frame: FrameType, wanted: list[Any]) -> bool:
    return any(value is item for value in gc.get_referents(frame) for item in wanted)


def _frames(error: BaseException) -> Iterator[FrameType]:
    """The frames of the calls between where the error was raised and where it was caught, and of the calls around those."""
    step = error.__traceback__
    frame = step.tb_frame.f_back if step else None
    while step is not None:
        yield step.tb_frame
        step = step.tb_next
    while frame is not None:
        yield frame
        frame = frame.f_back


def memory_left() -> bool:
    """Whether memory that can be slept is still allocated, from an engine that was open in this process before."""
    allocator = pool_allocator()
    return allocator is not None and bool(allocator.get_current_usage())


def pool_allocator() -> Any:
    """vLLM's allocator for memory that can be slept, where an engine has used it in this process."""
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.instance


def _empty_pool(allocator: Any) -> None:
    """Frees what lies in the allocator's pools and gives the free pieces back one by one, as vLLM does itself. Destroying a pool
    whole would fail at a piece that vLLM had given back before, and keep the rest."""
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
    # Use type(), not isinstance(): some objects run code when __class__ is read.
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


def apply(parts: EngineParts) -> None:
    parts.before_close.append(free_engine)


PATCH = Patch(name="close_memory", around_start=import_workers, apply=apply)
