"""Files of an adapter that may come from anywhere: read once, and looked at in full before a tensor is built from them.

Nothing here unpickles, imports or follows a link out of the adapter's folder. Imports neither torch nor peft.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teamtr_lora.common.errors import UserError

MAX_JSON_BYTES = 4 << 20
MAX_HEADER_BYTES = 32 << 20
MAX_WEIGHT_BYTES = 4 << 30
MAX_RANK = 512
MAX_JSON_DEPTH = 64  # of JSON: a dozen is much, and what reads it later goes down by calls

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


def show(value: object) -> str:
    """A name from outside, fit for one line of a terminal whatever is in it."""
    text = ascii(value)
    return text if len(text) <= 120 else text[:117] + "..."


def read_regular(path: Path, limit: int, *, folder: Path | None = None) -> bytes:
    """The bytes of a plain file. A device, a pipe, a link out of `folder` (any link without one) or too much is refused."""
    where = f"{path}"
    if folder is not None:
        target = Path(os.path.realpath(path))  # does not raise on circular links; open() then refuses them
        if not target.is_relative_to(os.path.realpath(folder)):
            raise UserError(f"{where}: a link out of its folder; copy the file itself to where the link is")
        path = target
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        what = "a link; put the file itself there" if path.is_symlink() else f"cannot be read ({error.strerror})"
        raise UserError(f"{where}: {what}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise UserError(f"{where}: not a plain file")
    with os.fdopen(descriptor, "rb") as file:
        if status.st_size > limit:
            raise UserError(f"{where}: {status.st_size} bytes are more than the {limit} that such a file may have")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"{where}: grew past {limit} bytes while it was read")
    return data


def parse_json(data: bytes | str, where: str) -> dict[str, Any]:
    """A JSON object; keys that appear twice, NaN, infinity and deep nesting are refused."""
    try:
        value = json.loads(data, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair cannot be written to any file
    except RecursionError as error:
        raise UserError(f"{where}: nested too deep to be read") from error
    except ValueError as error:  # JSONDecodeError and UnicodeError are such
        raise UserError(f"{where}: no proper JSON ({' '.join(ascii(str(error))[1:-1].split())[:160]})") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: holds no JSON object")
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [inner for inner in level if isinstance(inner, (dict, list))]
    if level:
        raise UserError(f"{where}: nested too deep to be read")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {show(key)} appears twice")
        result[key] = value
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


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
