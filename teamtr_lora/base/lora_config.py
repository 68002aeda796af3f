"""PEFT's adapter_config.json as it may come from anywhere: what plain LoRA needs is read, everything else refused by name; and
whether the layers of a base can carry such an adapter.

Only what is returned here is ever used; the file itself is not passed on. Imports neither torch nor peft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from teamtr_lora.base.adapter_files import MAX_RANK
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.foreign_files import show

if TYPE_CHECKING:
    from teamtr_lora.base.frozen_base import LinearShape


@dataclass(frozen=True)
class PlainLora:
    rank: int
    alpha: float
    rslora: bool
    dora: bool


# What to do instead of a feature that changes what the adapter computes in a way no engine here does.
_INSTEAD = {
    "rank_pattern": "train with one rank r for all modules",
    "alpha_pattern": "train with one lora_alpha for all modules",
    "modules_to_save": "the base stays frozen: train without it",
    "layer_replication": "it changes the base: train without it",
    "trainable_token_indices": "embeddings stay frozen: train without it",
    "target_parameters": "adapt linear modules (target_modules) instead",
    "fan_in_fan_out": "it is for Conv1D layers; use a base with linear layers",
    "alora_invocation_tokens": "activated LoRA is another policy in each engine: train a plain LoRA",
    "arrow_config": "import the single adapters, one an agent",
    "megatron_config": "export it from Megatron as a plain PEFT LoRA",
}
# Says how training went or which modules carry the adapter: the tensors themselves tell that.
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "task_type", "lora_dropout",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size",
    "eva_config", "corda_config", "lora_ga_config", "loftq_config", "runtime_config",
}  # fmt: skip
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "bias", "init_lora_weights"}
# Starting values that leave the base as it is; the others (pissa, olora, corda, loftq) change it.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica", "lora_ga")


def read_lora_config(config: Mapping[str, Any], where: str) -> PlainLora:
    """Rank and scale of a plain LoRA (or rsLoRA, or DoRA)."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UserError(f"{where}: peft_type is {show(kind)}; only LORA adapters can be used")
    for key, value in config.items():
        if key not in _READ | _WITHOUT_EFFECT and value not in (None, False, "", [], {}):
            fix = _INSTEAD.get(key, "it is no setting of plain LoRA known here: train without it")
            raise UserError(f"{where}: {show(key)[1:-1]} = {show(value)} is not supported; {fix}")
    if config.get("bias", "none") != "none":
        raise UserError(f"{where}: bias = {show(config['bias'])} is not supported; train with bias='none'")
    start = config.get("init_lora_weights", True)
    if not any(start is plain or (isinstance(start, str) and start.lower() == plain) for plain in _PLAIN_STARTS):
        raise UserError(
            f"{where}: init_lora_weights = {show(start)} changes the base's weights; convert it to a plain LoRA with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    _check_paths(config, where)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise UserError(f"{where}: r = {show(rank)}; the rank must be a whole number from 1 to {MAX_RANK}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha <= 1e9:
        raise UserError(f"{where}: lora_alpha = {show(alpha)}; it must be a positive number, at most 1e9")
    for key in ("use_rslora", "use_dora"):
        if type(config.get(key, False)) is not bool:
            raise UserError(f"{where}: {key} = {show(config[key])}; it must be true or false")
    return PlainLora(rank, float(alpha), rslora=config.get("use_rslora", False), dora=config.get("use_dora", False))


def _check_paths(config: Mapping[str, Any], where: str) -> None:
    """Module names are names. (base_model_name_or_path is never opened: it may be a path of the machine it was made on.)"""
    for key in ("target_modules", "exclude_modules", "layers_pattern", "revision"):
        value = config.get(key)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (".." in text or text.startswith(("/", "\\", "~"))):
                raise UserError(f"{where}: {key} = {show(text)} reads as a path; it must be a name")


def misfit(rank: int, targets: str | Sequence[str], linears: Sequence[LinearShape]) -> tuple[str, str] | None:
    """Why layers cannot carry such an adapter: the setting that is wrong, and the reason; None where they can."""
    ends = {linear.name.rpartition(".")[2] for linear in linears}
    known = ends | {linear.name for linear in linears}
    missing = [] if isinstance(targets, str) else [target for target in targets if target not in known]
    if missing:
        listed = ", ".join(sorted(ends))
        return "targets", f"{missing[0]!r} is no linear layer of this base (the head stays frozen); it has {listed}"
    narrow = min(targeted(targets, linears), key=lambda linear: min(linear.in_features, linear.out_features))
    width = min(narrow.in_features, narrow.out_features)
    return ("rank", f"{rank} is more than layer {narrow.name} is wide; use at most {width}") if rank > width else None


def targeted(targets: str | Sequence[str], linears: Sequence[LinearShape]) -> list[LinearShape]:
    """The linear layers that a recipe's lora.targets mean: all, or those of these names or last parts of names."""
    return [x for x in linears if isinstance(targets, str) or {x.name, x.name.rpartition(".")[2]} & {*targets}]
