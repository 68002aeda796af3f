"""Finding every problem of a recipe at once."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from teamtr_lora.recipe.recipe import Recipe, TeamTRConfig
from teamtr_lora.recipe.words import LISTED, MISSING, UNTOLD, Loc, Problem, explain, key_text, locate

# A round finds the wrong keys, and each further round the broken rules of one more level: router or task, team, recipe. Two are
# to spare.
_ROUNDS = 6

# By the key at which a rule is reported: the other keys that the rule reads.
_READS: dict[str, list[Loc]] = {
    "trust_region.holdout": [("rollout", "items_per_stage")],
    "rollout.items_per_stage": [("training",), ("trust_region", "holdout"), ("team", "agents")],
    "training.update": [("training", "resampling")],
    "training.shard": [("rollout",), ("base", "quantization"), ("team", "agents")],
    "task.path": [("task", "hub")],
    "task.hub": [("task", "path")],
    "team.router.callable": [("team", "router", "kind")],
    "team.router.kind": [("team", "protocol", "view")],
    "team.router.judge": [("team", "router", "kind")],
    "team.recombine": [("team", "router")],
}

Settings = TypeVar("Settings", bound=TeamTRConfig)


def problems(data: Any) -> list[Problem]:
    """Every problem of a merged recipe; empty exactly when `Recipe` accepts it."""
    return check(data)[1]


def check(data: Any) -> tuple[Recipe | None, list[Problem]]:
    """The recipe, or every problem with it."""
    if not isinstance(data, Mapping):
        return None, [Problem("recipe", data, "must be a mapping of sections", "start with team:, task: and training:")]
    return check_settings(data, Recipe)


def check_settings(data: Mapping[str, Any], model: type[Settings]) -> tuple[Settings | None, list[Problem]]:
    """Settings of a kind, or every problem with them.

    Rules between keys are checked only once each key is right by itself. So that they are reported together with the
    wrong keys, each wrong key is repaired in a copy and the copy is looked at again: a rule that still fails there is
    a problem of its own unless it rests on a repaired key.
    """
    copied: dict[str, Any] = copy.deepcopy(dict(data))
    found: dict[Loc, Problem] = {}
    bad: set[Loc] = set()
    for _ in range(_ROUNDS):
        try:
            settings = model.model_validate(copied)
        except ValidationError as error:
            wrong: dict[Loc, str] = {}
            for detail in error.errors(include_url=False):
                loc, node, parent = locate(detail["loc"])
                kind = detail["type"]
                if loc not in found and not (kind == "rule" and _echoes(loc, bad)):
                    told = len(found) < LISTED
                    found[loc] = explain(kind, detail.get("ctx", {}), loc, node, parent, _value_at(data, loc)) if told else UNTOLD
                wrong.setdefault(loc, kind)
            if len(found) > LISTED:  # nobody reads what a further round would find
                break
            bad |= wrong.keys()
            for loc, kind in wrong.items():
                _repair(copied, loc, kind)
        else:
            return (None, list(found.values())) if found else (settings, [])
    return None, list(found.values())


def _echoes(rule: Loc, bad: set[Loc]) -> bool:
    """Whether a rule broken at `rule` may only be broken because one of the keys it reads was repaired."""
    reads: list[Loc] = [rule, *_READS.get(key_text(rule), [])]
    if rule[:2] == ("team", "router") and rule[2:3] in (("sequence",), ("kind",), ("judge",)):
        reads.append(("team", "agents"))
    return any(_overlap(key, other) for key in reads for other in bad)


def _overlap(a: Loc, b: Loc) -> bool:
    """Whether one key is the other or a section around it."""
    shared = min(len(a), len(b))
    return a[:shared] == b[:shared]


def _repair(data: Any, loc: Loc, kind: str) -> None:
    """Make the key at `loc` acceptable: its default, or a stand-in where it is required."""
    match loc:
        case ("team",) | ("team", "agents") if kind != "extra_forbidden":
            data["team"] = {**_mapping(data.get("team")), "agents": [{"name": "stand-in"}]}
        case ("team", "agents", int(i)):
            data["team"]["agents"][i] = {"name": f"stand-in-{i}"}
        case ("team", "agents", int(i), "name"):
            data["team"]["agents"][i]["name"] = f"stand-in-{i}"
        case ("team", "router", *_) if kind == "rule":
            data["team"]["router"] = {}
        case ("task", "reward" | "callable" as key) if kind != "extra_forbidden":
            data["task"][key] = "stand:in"
        case ("task", "path") if kind == "rule":
            data["task"]["path"] = "stand-in.jsonl"
        case _:
            _drop(data, loc)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _drop(data: Any, loc: Loc) -> None:
    """Remove a key. A list is dropped as a whole, since removing one element would move the others' indices."""
    while isinstance(loc[-1], int):
        loc = loc[:-1]
    holder = _value_at(data, loc[:-1])
    if isinstance(holder, dict):
        holder.pop(loc[-1], None)


def _value_at(data: Any, loc: Loc) -> Any:
    for part in loc:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return MISSING
    return data
