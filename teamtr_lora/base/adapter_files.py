"""Weights of an adapter that may come from anywhere: looked at in full before a tensor is built from them.

Nothing here unpickles or imports. Imports neither torch nor peft.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.foreign_files import parse_json, show

MAX_JSON_BYTES = 4 << 20
MAX_HEADER_BYTES = 32 << 20
MAX_WEIGHT_BYTES = 4 << 30
MAX_RANK = 512

WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}  # the types of a LoRA matrix, as safetensors names them
_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>\w+(?:\.\w+)*)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_magnitude_vector)", re.ASCII
)
_PICKLES = (b"\x80", b"PK\x03\x04")


@dataclass(frozen=True)
class LoraMatrix:
    """Where a tensor of a LoRA adapter belongs."""

    module: str  # of the base, as in model.named_modules()
    part: str  # A, B or magnitude


def read_header(
    data: bytes | memoryview, where: str, *, size: int | None = None
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shapes of tensors and metadata that a safetensors file declares; they must fill the file exactly, without gaps or overlaps.

    `data` holds at least the header; `size` is the length of the whole file, where that is more.
    """
    size = len(data) if size is None else size
    length = int.from_bytes(data[:8], "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        if bytes(data[:4]).startswith(_PICKLES):
            raise UserError(f"{where}: holds a pickle, which can run code when loaded; save the adapter again as safetensors")
        raise UserError(f"{where}: not a safetensors file (its header would have {length} bytes, the file has {size})")
    entries = parse_json(bytes(data[8 : 8 + length]), f"{where}: its header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError(f"{where}: its header's metadata is no mapping of text")
    spans, shapes = [], {}
    for name, entry in entries.items():
        shapes[name], span = _entry(name, entry, where)
        spans.append(span)
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise UserError(f"{where}: its tensors overlap or leave gaps at byte {min(start, end)}")
        end = stop
    if end != size - 8 - length:
        raise UserError(f"{where}: its header describes {end} bytes of tensors, the file holds {size - 8 - length}")
    return shapes, metadata


def _entry(name: str, entry: Any, where: str) -> tuple[tuple[int, ...], tuple[int, int]]:
    """The shape of a tensor, and the bytes it lies in."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise UserError(f"{where}: the header's entry for {show(name)} is malformed")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in WIDTHS:
        raise UserError(f"{where}: {show(name)} is of type {show(dtype)}; a LoRA matrix is {', '.join(WIDTHS)}")
    if not _naturals(shape) or not 1 <= len(shape) <= 2 or 0 in shape or not _naturals(offsets) or len(offsets) != 2:
        raise UserError(f"{where}: {show(name)} has shape {show(shape)} at {show(offsets)}, which no LoRA matrix has")
    if offsets[1] - offsets[0] != math.prod(shape) * WIDTHS[dtype]:
        raise UserError(f"{where}: {show(name)} has shape {show(shape)} but {offsets[1] - offsets[0]} bytes")
    return tuple(shape), (offsets[0], offsets[1])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 1 << 48 for number in value)


def read_matrices(shapes: Mapping[str, tuple[int, ...]], rank: int, where: str, *, dora: bool = False) -> dict[str, LoraMatrix]:
    """What each tensor is to a LoRA of this rank: every module has A and B (and, with DoRA, a magnitude), and nothing else."""
    if not shapes:
        raise UserError(f"{where}: holds no tensors")
    found: dict[str, LoraMatrix] = {}
    parts: dict[str, set[str]] = {}
    for name, shape in shapes.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise UserError(f"{where}: {show(name)} is no LoRA matrix of a linear layer{_named_feature(name)}")
        part = {"lora_A.weight": "A", "lora_B.weight": "B"}.get(match["part"], "magnitude")
        fits = {"A": shape[:1] == (rank,), "B": shape[1:] == (rank,), "magnitude": dora}[part]
        if not fits or len(shape) != (1 if part == "magnitude" else 2):
            raise UserError(f"{where}: {show(name)} has shape {list(shape)}, the config says rank {rank}, use_dora {dora}")
        found[name] = LoraMatrix(match["module"], part)
        parts.setdefault(match["module"], set()).add(part)
    wanted = {"A", "B"} | ({"magnitude"} if dora else set())
    for module, have in parts.items():
        if have != wanted:
            raise UserError(f"{where}: {show(module)} lacks its {' and '.join(sorted(wanted - have))}")
    return found


def _named_feature(name: str) -> str:
    if "lora_embedding" in name:
        return " (it adapts the embedding, which stays frozen here; train without it)"
    if name.endswith(".lora_B.bias"):
        return " (lora_bias is not supported; train with lora_bias=False)"
    if ".." in name or "/" in name or "\\" in name:
        return " (such a name could be read as a path)"
    return ""
