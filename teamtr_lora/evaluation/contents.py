"""Hashes of what a recipe names but does not hold: code and data. Their user may change them in place, and results from
before and after such a change must not be mixed."""

from __future__ import annotations

from pathlib import Path

from teamtr_lora.common.code_paths import code_hash
from teamtr_lora.common.files import file_sha256
from teamtr_lora.recipe import Recipe
from teamtr_lora.recipe.named import named_code
from teamtr_lora.registry.local_keys import local_files


def code_hashes(recipe: Recipe) -> dict[str, str]:
    """Of the user's own Python that the recipe names, by its key."""
    named = named_code(recipe.model_dump(mode="json"))
    return {key: code_hash(path, key=key, folder=recipe.folder) for key, path in named.items()}


def data_hashes(recipe: Recipe) -> dict[str, str]:
    """Of the files that the recipe reads, by their keys."""
    named = local_files(recipe.model_dump(mode="json"))
    return {key: file_sha256(recipe.folder / Path(path).expanduser()) for key, path in named.items()}
