"""Optimizers over one agent's own parameters, and their state as plain tensors for the checkpoint."""

from __future__ import annotations

import pkgutil
from typing import Any

import torch
from torch import Tensor, nn

from teamtr_lora.algorithm.variants.optimizer_kinds import OPTIMIZERS
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import TrainingSection


def build_optimizer(training: TrainingSection, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    made_by = OPTIMIZERS[training.optimizer].made_by
    try:
        kind = pkgutil.resolve_name(made_by)
    except ImportError as error:
        package = made_by.partition(".")[0]
        raise UserError(
            f"training.optimizer = {training.optimizer!r} needs {package}; install teamtr-lora[quant] or use adamw"
        ) from error
    optimizer: torch.optim.Optimizer = kind(parameters, lr=training.starting_rate, weight_decay=training.weight_decay)
    optimizer.register_step_post_hook(lambda *_: torch.autograd.graph.increment_version(parameters))  # bitsandbytes does not
    return optimizer


def build_loss_scaler(device: torch.device, *, half_precision: bool) -> torch.amp.GradScaler:
    """Gradients pass through half-precision activations on their way to the float32 adapters; elsewhere it changes nothing."""
    scaler = torch.amp.GradScaler(device.type, enabled=half_precision, init_scale=2.0**12)
    scaler.scale(torch.zeros(1, device=device))  # a process without a micro-batch never scales a loss
    return scaler


def flatten_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state as tensors for safetensors, and what is no tensor as JSON."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}

    def walk(prefix: str, state: dict[Any, Any]) -> None:  # bitsandbytes nests its quantisation maps
        for key, value in state.items():
            if isinstance(value, dict):
                walk(f"{prefix}{key}/", value)
            elif isinstance(value, Tensor):
                # a copy: optimizers of one process share maps, and safetensors stores no tensor twice
                tensors[f"{prefix}{key}"] = value.detach().cpu().clone().contiguous()
            elif isinstance(value, (int, float, str)) or value is None:
                scalars[f"{prefix}{key}"] = value

    walk("", optimizer.state_dict()["state"])
    return tensors, scalars


def restore_state(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], scalars: dict[str, Any]) -> None:
    """The recipe's learning rate and weight decay stand; the moments come back bit for bit."""
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **scalars}.items():
        index, *nested, key = name.split("/")
        place = state.setdefault(int(index), {})
        for part in nested:
            place = place.setdefault(part, {})
        # a tensor read from a file lies anywhere in memory, and vectorised kernels round by alignment: a copy is aligned again
        place[key] = value.clone() if isinstance(value, Tensor) else value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
