"""Writes the manifests of the shipped team anew after keys were added to recipes or manifests, or taken away; its adapters stay
as they are.

    python tools/refresh_reference_team.py

A key whose value changed means another training: then train recipes/quickstart.yaml and import that run instead
(teamtr-lora adapters rm column_sum --all; teamtr-lora adapters import RUN --team column_sum).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from teamtr_lora.common.files import dump_json, write_atomic
from teamtr_lora.recipe import load_recipe
from teamtr_lora.registry.identity import protocol_hash
from teamtr_lora.registry.manifest import OWN_HASH, own_hash
from teamtr_lora.registry.reader import RegistryReader
from teamtr_lora.registry.verify import verify

REPO = Path(__file__).resolve().parent.parent
FILE = REPO / "adapters" / "column_sum" / "team-0001.json"


def changed(old: Any, new: Any, key: str = "") -> list[str]:
    """Keys that both have, with different values."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [found for name in old.keys() & new.keys() for found in changed(old[name], new[name], f"{key}.{name}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [found for i, pair in enumerate(zip(old, new, strict=True)) for found in changed(*pair, f"{key}.{i}")]
    return [] if old == new else [key.removeprefix(".")]


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    manifest = json.loads(FILE.read_text())
    recipe = load_recipe(REPO / "recipes" / "quickstart.yaml")
    other = changed(manifest["recipe"], recipe.model_dump(mode="json"))
    if other:
        print(f"changed since it was trained: {', '.join(sorted(other))}; train it again", file=sys.stderr)
        return 2
    manifest |= {"recipe": recipe.model_dump(mode="json"), "protocol_hash": protocol_hash(recipe.team)}
    write_atomic(FILE, dump_json(manifest | {OWN_HASH: own_hash(manifest)}))
    for path in sorted(FILE.parent.glob("*/*/manifest.json")):
        adapter = json.loads(path.read_text())
        if OWN_HASH not in adapter:  # one that has it and does not fit was altered: verify says so
            write_atomic(path, dump_json(adapter | {OWN_HASH: own_hash(adapter)}))
    problems = verify(RegistryReader(FILE.parent.parent)).problems
    for problem in problems:
        print(problem)
    return 2 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
