"""Whether an adapter is one that can be used, and whether it fits a base: from its bytes, before anything takes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

from safetensors.torch import load as load_safetensors
from torch import Tensor, isfinite

from teamtr_lora.base.adapter_files import read_header, read_matrices
from teamtr_lora.base.bank import exported_config, lora_config
from teamtr_lora.base.frozen_base import BaseFacts
from teamtr_lora.base.lora_config import PlainLora, read_lora_config, targeted
from teamtr_lora.base.source import PICKLE_PATTERNS
from teamtr_lora.base.versions import CONFIG, WEIGHTS, content_hash
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.foreign_files import parse_json, show
from teamtr_lora.recipe import LoraSection

_PICKLES = (*PICKLE_PATTERNS, "*.pkl", "*.pickle", "*.joblib", "*.dill")
# A trainer's own state, beside the adapter in each of its checkpoints; nobody takes these for weights.
_TRAINERS = ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin", "scaler.pt", "rng_state*.pth")


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
    shapes, _ = read_header(contents[WEIGHTS], f"{where}/{WEIGHTS}")
    read_matrices(shapes, lora.rank, f"{where}/{WEIGHTS}", dora=lora.dora)
    tensors = load_safetensors(contents[WEIGHTS])
    for name, tensor in tensors.items():
        if not bool(isfinite(tensor).all()):
            raise UserError(f"{where}/{WEIGHTS}: {name} holds NaN or infinity; the adapter is broken")
    if expected is not None and content_hash(tensors, config) != expected:
        raise UserError(f"{where}: content does not match its hash {expected[:12]}; the adapter was altered")
    return tensors, config


def understand(contents: Mapping[str, bytes], where: str, facts: BaseFacts | None = None) -> Adapter:
    """A foreign adapter as this program would compute it; with `facts`, only one that fits that base."""
    tensors, config = open_contents(contents, where)
    plain = read_lora_config(config, where)
    targets = _targets(tensors, plain, f"{where}/{WEIGHTS}", facts)
    if facts is not None:
        _check_modules(config, modules_of(targets, facts), facts, f"{where}/{CONFIG}")
    lora = LoraSection(rank=plain.rank, alpha=plain.alpha, targets=targets, rslora=plain.rslora, dora=plain.dora)
    return Adapter({name: tensor.float() for name, tensor in tensors.items()}, lora)  # half precision widens exactly


def _targets(tensors: Mapping[str, Tensor], plain: PlainLora, where: str, facts: BaseFacts | None) -> list[str]:
    """The modules that carry the adapter, by the shortest names that mean exactly them; each must fit the base."""
    matrices = read_matrices({name: tensor.shape for name, tensor in tensors.items()}, plain.rank, where, dora=plain.dora)
    carried = {matrix.module for matrix in matrices.values()}
    if facts is None:
        return sorted(carried)
    linears = {linear.name: linear for linear in facts.linears}
    for name, matrix in sorted(matrices.items()):  # safetensors has no order, errors should
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
        have, need = list(tensors[name].shape), list(shapes[matrix.part])
        if have != need:
            raise UserError(f"{where}: {show(name)} has shape {have}, the base needs {need}; is it for another base?")
        if plain.rank > min(linear.in_features, linear.out_features):
            raise UserError(f"{where}: rank {plain.rank} is larger than {show(matrix.module)} is wide")
    ends = sorted({module.rpartition(".")[2] for module in carried})
    return ends if set(modules_of(ends, facts)) == carried else sorted(carried)


def _check_modules(config: Mapping[str, Any], carried: list[str], facts: BaseFacts, where: str) -> None:
    """The modules that a config names are those that carry tensors: PEFT would load others, and compute something else.

    A pattern as target_modules is not tried: matching a stranger's pattern can take for ever. The tensors themselves decide.
    """
    named, excluded = config.get("target_modules"), config.get("exclude_modules") or []
    layers, holder = config.get("layers_to_transform"), config.get("layers_pattern")
    if not isinstance(named, list) or not isinstance(excluded, list):
        if layers is not None and layers != []:
            raise UserError(f"{where}: layers_to_transform = {show(layers)} needs target_modules as a list of names")
        return
    kept = layers if isinstance(layers, list) else [] if layers is None else [layers]
    holders = holder if isinstance(holder, list) else [holder] if holder else []
    if not all(isinstance(name, str) for name in [*named, *excluded, *holders]) or not all(type(n) is int for n in kept):
        raise UserError(f"{where}: target_modules, exclude_modules and layers_pattern must be names, layers_to_transform numbers")
    meant = {
        linear.name for linear in facts.linears
        if _ends(linear.name, named) and not _ends(linear.name, excluded)
        and (linear.name in named or not kept or _layer(linear.name, holders) in kept)
    }  # fmt: skip
    for module in sorted(meant ^ set(carried)):
        tells = "says nothing of" if module in carried else "means"
        has = "has tensors" if module in carried else "has no tensors"
        raise UserError(f"{where}: target_modules (with layers_to_transform) {tells} {show(module)}, which {has}; it was altered")


def _ends(module: str, names: list[str]) -> bool:
    return module in names or any(module.endswith(f".{name}") for name in names)


def _layer(module: str, holders: list[str]) -> int | None:
    """The number of the layer that a module is in: the first number in its name, or the first after one of `holders`."""
    parts = module.split(".")
    found = (int(part) for before, part in pairwise(parts) if part.isdecimal() and (not holders or before in holders))
    return next(found, None)


def check_targets(carried: Iterable[str], wanted: LoraSection, facts: BaseFacts | None, where: str) -> None:
    """The modules that carry an adapter are those that its recipe names: training and sampling put it on those. Without `facts`
    (the base is not here) as far as the names themselves tell."""
    carried, targets = set(carried), wanted.targets
    if facts is not None:
        fits = carried == set(modules_of(targets, facts))
    else:
        fits = isinstance(targets, str) or (
            all(_ends(module, targets) for module in carried)
            and all(any(_ends(module, [name]) for module in carried) for name in targets)
        )
    if not fits:
        raise UserError(f"{where}: is on other modules than the recipe's lora.targets says; it was altered")


def modules_of(targets: str | list[str], facts: BaseFacts) -> list[str]:
    """The base's modules that a recipe's lora.targets mean."""
    return [linear.name for linear in targeted(targets, facts.linears)]


def check_lora(have: PlainLora | LoraSection, wanted: LoraSection, where: str) -> None:
    """Refuses an adapter whose rank or scale is not what its recipe says: it is applied with the recipe's."""
    for key in ("rank", "alpha", "rslora", "dora"):
        if getattr(have, key) != getattr(wanted, key):
            raise UserError(f"{where}: has {key} {getattr(have, key)}, the recipe says {getattr(wanted, key)}; it was altered")


def pickles(names: Iterable[str]) -> list[str]:
    """Those of the names that are pickles, which are never read."""
    return sorted(name for name in names if any(fnmatchcase(name.lower(), pattern) for pattern in _PICKLES))


def refuse_pickles(names: Iterable[str], where: str) -> list[str]:
    """The pickles of a trainer among the files beside an adapter; any other is refused."""
    found = pickles(names)
    for name in found:
        if not any(fnmatchcase(name, pattern) for pattern in _TRAINERS):
            raise UserError(
                f"{where}: {show(name)} is a pickle, which can run code when loaded; remove it, or save the adapter again with "
                "PEFT's save_pretrained, which writes safetensors only"
            )
    return found
