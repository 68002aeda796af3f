"""A base that is too large for one GPU: its decoder layers are split over the processes of a run, by torch's FSDP2.

A layer's weights are gathered when a pass comes to it, in their stored precision, and freed behind it. Only frozen weights are
split. Adapters are put on afterwards and are whole in every process, as are the embeddings, the last norm and the output head,
which the KL reads in chunks of tokens. Each pass is a collective: all processes have to make equally many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from teamtr_lora.base.memory_model import MARGIN, SIZES, UpdateShape, update_memory, update_peak
from teamtr_lora.base.precision import decoder_layers

if TYPE_CHECKING:
    from teamtr_lora.base.frozen_base import BaseFacts

GATHERED = 2  # layers that are whole at a time: one computes while the next one arrives


def splits(choice: str, facts: BaseFacts, *, over: int, value: int, device_bytes: int | None, engine_bytes: int) -> bool:
    """Whether the base is split `over` so many processes. `auto`: where one GPU has no room for the base, what the engine takes
    of it, and the smallest update. `choice` is training.shard; `value`: bytes of a weight; on a CPU `device_bytes` is None."""
    if over == 1 or choice != "auto" or device_bytes is None:
        return over > 1 and choice == "always"
    few = SIZES[0]
    shape = UpdateShape(
        tokens=few, learned_tokens=few, judged_tokens=few, rank=1, value=value, path="fused", checkpointing=True, head_chunk=few
    )
    return facts.parameters * value + engine_bytes + MARGIN * update_peak(update_memory(facts, shape)) > device_bytes


def split_bytes(facts: BaseFacts, value: int, over: int) -> int:
    """Of the base on one GPU: its part of the layers, those that are gathered, and all that is not in a layer."""
    layers = sum(linear.in_features * linear.out_features for linear in facts.linears)
    return value * (facts.parameters - layers + layers // over + GATHERED * layers // facts.layers)


def split_layers(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Splits the decoder layers of a base in RAM over all processes of torch's default group; all of it is then on `device`.

    Layer by layer: no process ever has the whole base on its GPU. In RAM it stays what is mapped from its files.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, layers = init_device_mesh(device.type, (dist.get_world_size(),)), decoder_layers(model)
    inside = set(layers.parameters())
    outside = {parameter for parameter in model.parameters() if parameter not in inside}
    for parameter in outside:
        parameter.data = parameter.data.to(device, dtype)
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(dtype)
        fully_shard(layer, mesh=mesh)  # moves it to the device and keeps this process's part
    # what is around the layers has no part of its own to gather: it only lets the next layer arrive while one computes
    fully_shard(model.base_model, mesh=mesh, ignored_params=outside)
