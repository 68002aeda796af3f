"""Nested mappings as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(values: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """By their keys, joined. An empty mapping within is a value itself."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = flat(value, separator) if isinstance(value, dict) else {}
        found |= {f"{key}{separator}{name}": one for name, one in inner.items()} or {key: value}
    return found
