"""Starting vLLM in this process."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import RolloutSection
from teamtr_lora.recipe.engine_facts import ENGINES
from teamtr_lora.rollout.vllm.patches.choice import chosen
from teamtr_lora.rollout.vllm.patches.close_memory import memory_left
from teamtr_lora.rollout.vllm.patches.lora_layers import DENSE_COLUMNS, fits_side_by_side
from teamtr_lora.rollout.vllm.patches.patch import Patch
from teamtr_lora.rollout.vllm.public_interface import Adapters, EngineParts, FolderAdapters, PublicQueue, close_parts

if TYPE_CHECKING:  # peft takes seconds to import, and `serve` needs none of it
    from teamtr_lora.base.bank import AdapterBank
    from teamtr_lora.base.frozen_base import FrozenBase

logger = logging.getLogger(__name__)

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
# CUDA graphs are captured for steps of these many tokens: all of vLLM's own choice take minutes to start, and without the large
# ones every step that takes in a prompt launches its kernels one by one.
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 3072, 4096)
TOKENS_PER_STEP = GRAPH_SIZES[-1]  # most tokens of one engine step, prompts included

_import: threading.Thread | None = None  # of vLLM, once it has begun
_one_engine = threading.Lock()  # held while an engine is open: engines of one process would share one process group
_ours: dict[str, str] = {}  # environment variables that an earlier engine of ours has set
_engines_slept = False  # whether an engine that can sleep was opened in this process before


def start_engine(base: FrozenBase, bank: AdapterBank, rollout: RolloutSection, *, context_tokens: int, lora: bool) -> EngineParts:
    """An engine in this process, with one LoRA slot per agent and one spare, and the patches that the recipe asks for.

    It is ended by `close_engine`, and only then can another be started.
    """
    _check_base(base)
    if not _one_engine.acquire(blocking=False):
        raise UserError(
            "rollout.engine = vllm: an engine is open in this process already, and vLLM cannot run two; close it first"
        )
    try:
        return _start(base, bank, rollout, context_tokens, lora)
    except BaseException:
        _one_engine.release()
        raise


def close_engine(parts: EngineParts) -> None:
    """Ends the engine; another one can then be started."""
    try:
        close_parts(parts)
    finally:
        _one_engine.release()


def _check_base(base: FrozenBase) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UserError("rollout.engine: vllm is not installed; pip install 'teamtr-lora[vllm]', or use engine=transformers")
    check_quantization("rollout.engine = vllm", base.quantization, base.device.type, "or rollout.engine=transformers")
    if base.device.index:
        raise UserError(
            f"base.device = {base.device}: vLLM in this process takes the first GPU it sees; use base.device=cuda and "
            f"CUDA_VISIBLE_DEVICES={base.device.index}"
        )


def check_quantization(where: str, quantization: str, device: str, otherwise: str) -> None:
    """Refuses a base that vLLM cannot serve LoRA on; `device` is cpu or cuda."""
    facts = ENGINES["vllm"]
    if not facts.takes_quantization(quantization, device):
        allowed = " or ".join(facts.quantization[device])
        raise UserError(
            f"{where}: vLLM cannot serve LoRA on a base quantised to {quantization}{' on a CPU' if device == 'cpu' else ''}; use "
            f"base.quantization={allowed}, {otherwise}"
        )


def begin_import(rollout: RolloutSection, device: torch.device, dtype: torch.dtype) -> threading.Thread:
    """Imports vLLM, which takes seconds of Python, in a thread of its own: libraries keep errors of optional imports, and such an
    error keeps the frames of the calls it passed through. Those of another thread hold neither our base nor the engine."""
    global _import
    _set_environment(rollout, device.type == "cuda", dtype)
    if _import is None:
        _import = threading.Thread(target=_import_vllm)
        _import.start()
    return _import


def _start(base: FrozenBase, bank: AdapterBank, rollout: RolloutSection, context_tokens: int, lora: bool) -> EngineParts:
    on_gpu = base.device.type == "cuda"
    began = time.monotonic()
    begin_import(rollout, base.device, base.dtype).join()
    imported = time.monotonic()
    from vllm import EngineArgs, LLMEngine, __version__

    split = rollout.vllm.tensor_parallel
    # patches change the engine in this process, and a split one has its workers in others
    patches = (
        []
        if split > 1
        else [p for p in chosen(rollout.vllm.patches, __version__, base.device.type) if lora or not p.for_adapters]
    )
    options: dict[str, Any] = common_options(
        base.folder, base.dtype, base.device.type, context_tokens=context_tokens, requests=rollout.requests_per_batch,
        memory_share=rollout.vllm.memory_share, quantization=base.quantization,
    )  # fmt: skip
    options |= _OPTIONS | (_gpu_options(rollout, patches) if on_gpu else {"distributed_executor_backend": "uni"})
    if split > 1:
        options |= {"tensor_parallel_size": split, "distributed_executor_backend": "mp"}
    if lora:
        options |= lora_options(len(bank.agents) + 1, max(bank.config(agent)["r"] for agent in bank.agents))
        modules = {name.split(".")[-3] for agent in bank.agents for name in bank.parameters(agent)}
        options["lora_target_modules"] = sorted(modules)
        if on_gpu:  # no request comes without an adapter, so graphs for such steps would be captured for nothing
            options["compilation_config"]["cudagraph_specialize_lora"] = False
        if on_gpu and base.dtype == torch.float32:
            _check_fp32(options, any(patch.name == "lora_layers" for patch in patches))
    made_group = not torch.distributed.is_initialized()
    try:
        with ExitStack() as around:
            for patch in patches:
                around.enter_context(patch.around_start(options))
            engine = LLMEngine.from_engine_args(EngineArgs(**options))
    except (ValueError, RuntimeError, AssertionError) as error:
        text = " ".join(str(error).split()) or f"{type(error).__name__}, without a word"
        size = "memory_share" if rollout.vllm.kv_cache_gib is None else "kv_cache_gib"
        hint = f"; change rollout.vllm.{size}" if "memory" in text else ""
        raise UserError(f"rollout.engine = vllm: the engine did not start: {text[:400]}{hint}") from error
    parts = EngineParts(engine, PublicQueue(engine), FolderAdapters(engine) if lora else Adapters(), made_group=made_group)
    try:
        _apply(patches, parts)
    except BaseException:
        close_parts(parts)
        raise
    parts.start_seconds = {"engine import": imported - began, "engine start": time.monotonic() - imported}
    # every step makes thousands of small objects: the collector must not walk the libraries' millions each time
    gc.collect()
    gc.freeze()
    return parts


def _import_vllm() -> None:
    from vllm import LLMEngine  # noqa: F401


def _apply(patches: list[Patch], parts: EngineParts) -> None:
    for patch in patches:
        if why_not := patch.apply(parts):
            logger.warning("patch %s does not fit this engine, vLLM's own way is taken: %s", patch.name, why_not)
        else:
            parts.patches += (patch.name,)


def _check_fp32(options: Mapping[str, Any], ours: bool) -> None:
    slots, rank = options["max_loras"], options["max_lora_rank"]
    if not (ours and fits_side_by_side(slots, rank)):
        raise UserError(
            f"base.precision = fp32: vLLM's own LoRA kernels take 16 bits only, and those of the patch lora_layers at most "
            f"{DENSE_COLUMNS} columns (here {slots} slots of rank {rank}); use base.precision=fp16, or "
            "rollout.engine=transformers"
        )


_OPTIONS: dict[str, Any] = {
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "trust_remote_code": False,
    "seed": 0,
}


def common_options(
    folder: Path, dtype: torch.dtype, device: str, *, context_tokens: int, requests: int, memory_share: float, quantization: str
) -> dict[str, Any]:
    """What an engine in this process and a server of `teamtr-lora serve` are both told, by vLLM's names."""
    options: dict[str, Any] = {
        "model": str(folder),
        "dtype": DTYPES[dtype],
        "max_model_len": context_tokens,
        "max_num_seqs": requests,
        "max_num_batched_tokens": max(TOKENS_PER_STEP, context_tokens, requests),
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature, which is the policy
        "generation_config": "vllm",  # the base's own sampling defaults would change the policy
    }
    if device == "cpu":
        # a seeded request whose prompt is cut into chunks fails there: CPU generators have no offset to turn back
        return options | {"enforce_eager": True, "enable_chunked_prefill": False}
    options["gpu_memory_utilization"] = memory_share
    options["compilation_config"] = {"cudagraph_capture_sizes": sorted({*GRAPH_SIZES, requests})}
    return options | ({"quantization": "bitsandbytes"} if quantization == "4bit" else {})


def lora_options(slots: int, rank: int) -> dict[str, Any]:
    room = ENGINES["vllm"].room_for(rank)
    return {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": room}


NO_SHARE = 0.01  # vLLM takes no 0


def _gpu_options(rollout: RolloutSection, patches: list[Patch]) -> dict[str, Any]:
    global _engines_slept
    # without the patch nothing tells what a closed engine has left, so any engine before this one counts
    left = memory_left() if any(patch.name == "close_memory" for patch in patches) else _engines_slept
    sleeps = _can_sleep(rollout.vllm.offload, left)
    _engines_slept = _engines_slept or sleeps
    options: dict[str, Any] = {"enable_sleep_mode": sleeps, "enforce_eager": not rollout.vllm.cuda_graphs}
    if rollout.vllm.kv_cache_gib is not None:  # vLLM then asks for a share only to see whether so much is free when it starts
        options |= {"kv_cache_memory_bytes": rollout.vllm.kv_cache_gib * 2**30, "gpu_memory_utilization": NO_SHARE}
    return options


def _can_sleep(offload: Literal["auto", "never", "always"], left: bool) -> bool:
    """vLLM gives memory that can be slept to one engine at a time, and refuses while any is `left` of the one before."""
    if offload == "never" or not left:
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
            "VLLM_CPU_KVCACHE_SPACE": str(rollout.vllm.kv_cache_gib or 1),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer may compute on the same cores
        }
    if importlib.util.find_spec("flashinfer") is None:
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if dtype == torch.float32:
        environment["TRITON_F32_DEFAULT"] = "ieee"  # vLLM's attention would multiply in TF32
    return environment
