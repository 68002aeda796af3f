"""Whether an adapter is one that can be used, and whether it fits a base: from its bytes, before anything takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load as load_safetensors
from torch import Tensor, isfinite

from teamtr_lora.base.adapter_files import StoredTensor, parse_json, read_header, read_matrices, show
from teamtr_lora.base.bank import exported_config, lora_config
from teamtr_lora.base.load import BaseFacts
from teamtr_lora.base.lora_config import PlainLora, read_lora_config
from teamtr_lora.base.versions import CONFIG, WEIGHTS, content_hash
from teamtr_lora.errors import UserError
from teamtr_lora.recipe import LoraSection


@dataclass(frozen=True)
class Adapter:
    """A foreign adapter, understood: what it computes and on which modules of the base."""

    tensors: dict[str, Tensor]
    lora: LoraSection

    def config(self, base: str) -> dict[str, Any]:
        return exported_config(lora_config(self.lora), base)


def open_contents(
    contents: Mapping[str, bytes], where: str, expected: str | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config out of the bytes of an adapter: a LoRA that can be used, finite, with the expected content hash."""
    config = parse_json(contents[CONFIG], f"{where}/{CONFIG}")
    lora = read_lora_config(config, f"{where}/{CONFIG}")
    header, _ = read_header(contents[WEIGHTS], f"{where}/{WEIGHTS}")
    read_matrices(header, lora.rank, f"{where}/{WEIGHTS}", dora=lora.dora)
    tensors = load_safetensors(contents[WEIGHTS])
    for name, tensor in tensors.items():
        if not bool(isfinite(tensor).all()):
            raise UserError(f"{where}/{WEIGHTS}: {name} holds NaN or infinity; the adapter is broken")
    if expected is not None and content_hash(tensors, config) != expected:
        raise UserError(f"{where}: content does not match its hash {expected[:12]}; the adapter was altered")
    return tensors, config


def understand(contents: Mapping[str, bytes], where: str, facts: BaseFacts | None = None) -> Adapter:
    plain = read_lora_config(parse_json(contents[CONFIG], f"{where}/{CONFIG}"), f"{where}/{CONFIG}")
    header, _ = read_header(contents[WEIGHTS], f"{where}/{WEIGHTS}")
    targets = _targets(header, plain, f"{where}/{WEIGHTS}", facts)
    tensors, _ = open_contents(contents, where)
    lora = LoraSection(rank=plain.rank, alpha=plain.alpha, targets=targets, rslora=plain.rslora, dora=plain.dora)
    return Adapter({name: tensor.float() for name, tensor in tensors.items()}, lora)  # half precision widens exactly


def _targets(header: Mapping[str, StoredTensor], plain: PlainLora, where: str, facts: BaseFacts | None) -> list[str]:
    """The modules that carry the adapter, by the shortest names that mean exactly them; each must fit the base."""
    matrices = read_matrices(header, plain.rank, where, dora=plain.dora)
    carried = {matrix.module for matrix in matrices.values()}
    if facts is None:
        return sorted(carried)
    linears = {linear.name: linear for linear in facts.linears}
    for name, matrix in matrices.items():
        linear = linears.get(matrix.module)
        if linear is None:
            known = ", ".join(sorted({linear.rpartition(".")[2] for linear in linears}))
            raise UserError(
                f"{where}: {show(matrix.module)} is no linear layer of the base that can be adapted; those are {known}"
            )
        shapes = {
            "A": (plain.rank, linear.in_features),
            "B": (linear.out_features, plain.rank),
            "magnitude": (linear.out_features,),
        }
        have, need = list(header[name].shape), list(shapes[matrix.part])
        if have != need:
            raise UserError(f"{where}: {show(name)} has shape {have}, the base needs {need}; is it for another base?")
        if plain.rank > min(linear.in_features, linear.out_features):
            raise UserError(f"{where}: rank {plain.rank} is larger than {show(matrix.module)} is wide")
    ends = sorted({module.rpartition(".")[2] for module in carried})
    return ends if set(modules_of(ends, facts)) == carried else sorted(carried)


def modules_of(targets: str | list[str], facts: BaseFacts) -> list[str]:
    """The base's modules that a recipe's lora.targets mean."""
    names = [linear.name for linear in facts.linears]
    return [name for name in names if targets == "all-linear" or name in targets or name.rpartition(".")[2] in targets]


def check_lora(have: PlainLora | LoraSection, wanted: LoraSection, where: str) -> None:
    """An adapter is applied with the scale that its recipe says: the two must agree."""
    for key in ("rank", "alpha", "rslora", "dora"):
        if getattr(have, key) != getattr(wanted, key):
            raise UserError(f"{where}: has {key} {getattr(have, key)}, the recipe says {getattr(wanted, key)}; it was altered")
