"""Starting vLLM in this process, and sharing a GPU with it."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Literal

import torch

from teamtr_lora.base.memory import reset_peak
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import RolloutSection
from teamtr_lora.rollout.vllm.close import pool_allocator
from teamtr_lora.rollout.vllm.internals import knows
from teamtr_lora.rollout.vllm.lora import DENSE_COLUMNS, fits_side_by_side, lora_side_by_side

if TYPE_CHECKING:  # peft takes seconds to import, and `serve` needs none of it
    from teamtr_lora.base.bank import AdapterBank
    from teamtr_lora.base.frozen_base import FrozenBase

logger = logging.getLogger(__name__)

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's max_lora_rank may be
DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
# CUDA graphs are captured for steps of these many tokens: all of vLLM's own choice take minutes to start, and without the large
# ones every step that takes in a prompt launches its kernels one by one.
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 3072, 4096)
TOKENS_PER_STEP = GRAPH_SIZES[-1]  # most tokens of one engine step, prompts included


def start_engine(base: FrozenBase, bank: AdapterBank, rollout: RolloutSection, *, context_tokens: int, lora: bool) -> Any:
    """An engine in this process, with one LoRA slot per agent and one spare."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError("rollout.engine: vllm is not installed; pip install 'teamtr-lora[vllm]', or use engine=transformers")
    on_gpu = base.device.type == "cuda"
    if base.quantization != "none" and not (on_gpu and base.quantization == "4bit"):
        raise UserError(
            f"rollout.engine = vllm: vLLM cannot serve LoRA on a base quantised to {base.quantization} "
            f"{'on a CPU' if not on_gpu else 'in flight'}; use base.quantization={'4bit or none' if on_gpu else 'none'}, "
            "or rollout.engine=transformers"
        )
    if base.device.index:
        raise UserError(
            f"base.device = {base.device}: vLLM in this process takes the first GPU it sees; use base.device=cuda and "
            f"CUDA_VISIBLE_DEVICES={base.device.index}"
        )
    if _live:
        raise UserError(
            "rollout.engine = vllm: an engine is open in this process already, and vLLM cannot run two; close it first"
        )
    _set_environment(rollout, on_gpu, base.dtype)
    # in another thread: errors that are kept from optional imports keep their frames, which would hold our base alive for good
    importing = threading.Thread(target=_import_vllm, args=(on_gpu,))
    importing.start()
    importing.join()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    options: dict[str, Any] = _options(base, rollout, context_tokens) | (_gpu_options(base, rollout) if on_gpu else _CPU_OPTIONS)
    if lora:
        options |= _lora_options(bank)
    from vllm import __version__

    dense = lora and knows(__version__)
    if dense:
        # vLLM keeps compiled models by their settings: one with its own layers must not stand in for one with ours
        options["additional_config"] = {"teamtr_lora": "adapters side by side"}
    if lora and on_gpu and base.dtype == torch.float32:
        _check_fp32(options, dense)
    try:
        with lora_side_by_side(options["max_loras"], options["max_lora_rank"]) if dense else nullcontext():
            engine = LLMEngine.from_engine_args(EngineArgs(**options))
    except (ValueError, RuntimeError, AssertionError) as error:
        text = " ".join(str(error).split()) or f"{type(error).__name__}, without a word"
        hint = "; change rollout.vllm.memory_share" if "memory" in text else ""
        raise UserError(f"rollout.engine = vllm: the engine did not start: {text[:400]}{hint}") from error
    # every step makes thousands of small objects: the collector must not walk the libraries' millions each time
    gc.collect()
    gc.freeze()
    _live.add(id(engine))
    return engine


def _check_fp32(options: Mapping[str, Any], dense: bool) -> None:
    slots, rank = options["max_loras"], options["max_lora_rank"]
    if not (dense and fits_side_by_side(slots, rank)):
        raise UserError(
            f"base.precision = fp32: vLLM's own LoRA kernels take 16 bits only, and ours at most {DENSE_COLUMNS} columns "
            f"(here {slots} slots of rank {rank}); use base.precision=fp16, or rollout.engine=transformers"
        )


def _import_vllm(on_gpu: bool) -> None:
    workers = ("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner") if on_gpu else ()
    for name in ("vllm.v1.engine.llm_engine", *workers):
        with suppress(ImportError):  # the engine's start will say it
            importlib.import_module(name)


_live: set[int] = set()  # engines open in this process: one at most, for they share one process group
_ours: dict[str, str] = {}  # environment variables that an earlier engine of ours has set


def engine_closed(engine: Any) -> None:
    _live.discard(id(engine))


def _nothing() -> None:
    pass


def _options(base: FrozenBase, rollout: RolloutSection, context_tokens: int) -> dict[str, Any]:
    return {
        "model": str(base.folder),
        "dtype": DTYPES[base.dtype],
        "max_model_len": context_tokens,
        "max_num_seqs": rollout.requests_per_batch,
        "max_num_batched_tokens": max(TOKENS_PER_STEP, context_tokens, rollout.requests_per_batch),
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature, which is the policy
        "generation_config": "vllm",  # the base's own sampling defaults would change the policy
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "trust_remote_code": False,
        "seed": 0,
    }


def _lora_options(bank: AdapterBank) -> dict[str, Any]:
    slots = len(bank.agents) + 1
    return {
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": slots,
        "max_lora_rank": next(r for r in RANKS if r >= max(bank.config(agent)["r"] for agent in bank.agents)),
        "lora_target_modules": sorted({name.split(".")[-3] for agent in bank.agents for name in bank.parameters(agent)}),
    }


_CPU_OPTIONS = {
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
    # a seeded request whose prompt is cut into chunks fails there: CPU generators have no offset to turn back
    "enable_chunked_prefill": False,
}


def _gpu_options(base: FrozenBase, rollout: RolloutSection) -> dict[str, Any]:
    options: dict[str, Any] = {
        "gpu_memory_utilization": rollout.vllm.memory_share,
        "enable_sleep_mode": _can_sleep(rollout.vllm.offload),
        "enforce_eager": not rollout.vllm.cuda_graphs,
        "compilation_config": {"cudagraph_capture_sizes": sorted({*GRAPH_SIZES, rollout.requests_per_batch})},
    }
    if base.quantization == "4bit":
        options["quantization"] = "bitsandbytes"
    return options


def _can_sleep(offload: Literal["auto", "never", "always"]) -> bool:
    """vLLM gives memory that can be slept to one engine at a time, and refuses while any is left of the one before."""
    if offload == "never" or (allocator := pool_allocator()) is None or not allocator.get_current_usage():
        return offload != "never"
    if offload == "always":
        raise UserError(
            "rollout.vllm.offload = always: an engine that was open in this process has left memory that vLLM must not sleep; "
            "start a new process"
        )
    logger.warning("an engine that was open in this process has left memory behind: this one cannot sleep during updates")
    return False


def _set_environment(rollout: RolloutSection, on_gpu: bool, dtype: torch.dtype) -> None:
    """vLLM reads these when it is imported or started. What the user has set stays, the process layout aside."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # adapters are written from memory: the engine must be in this process
    for name, value in default_environment(rollout, on_gpu, dtype).items():
        if os.environ.get(name) in (None, _ours.get(name)):
            os.environ[name] = _ours[name] = value


def default_environment(rollout: RolloutSection, on_gpu: bool, dtype: torch.dtype) -> dict[str, str]:
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if not on_gpu:
        return environment | {
            "VLLM_CPU_KVCACHE_SPACE": str(rollout.vllm.kv_cache_gib),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer may compute on the same cores
        }
    if importlib.util.find_spec("flashinfer") is None:
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if dtype == torch.float32:
        environment["TRITON_F32_DEFAULT"] = "ieee"  # vLLM's attention would multiply in TF32
    return environment


SKIPPED_BYTES = 2**24  # an update that took no more than this trained nothing, and says nothing of what one needs


class SharedMemory:
    """Lends the engine's GPU memory to the trainer between rollouts: sleep before an update, wake before the next request.

    `auto` lets the engine sleep only where the memory left beside it is less than an update has needed so far; before the first
    update that is not known, so it sleeps once.
    """

    def __init__(
        self,
        engine: Any,
        device: torch.device,
        offload: Literal["auto", "never", "always"],
        before_sleep: Callable[[], None],
    ) -> None:
        self._engine, self._device, self._before_sleep = engine, device, before_sleep
        self._offload = offload if device.type == "cuda" else "never"
        self._needed: int | None = None
        self.asleep = False

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Around an update."""
        if self._offload == "never":
            yield
            return
        if self._offload == "always" or self._needed is None or self._free() < 1.2 * self._needed:
            self._sleep()
        before = torch.cuda.memory_allocated(self._device)
        reset_peak(self._device)
        try:
            yield
        finally:
            needed = torch.cuda.max_memory_allocated(self._device) - before
            if needed > SKIPPED_BYTES:
                self._needed = max(self._needed or 0, needed)

    def wake(self) -> None:
        if self.asleep:
            torch.cuda.empty_cache()  # what the trainer's allocator keeps for itself, the engine needs back
            self._engine.wake_up()
            self.asleep = False

    def close(self) -> None:
        self._engine, self._before_sleep, self._offload = None, _nothing, "never"

    def _free(self) -> int:
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + kept

    def _sleep(self) -> None:
        if not self.asleep:
            self._before_sleep()
            self._engine.reset_prefix_cache()  # the blocks are given up
            self.asleep = True  # first: vLLM may fail when it has half gone to sleep, and is to be woken then
            self._engine.sleep(level=1)  # weights, adapters among them, wait in CPU memory
