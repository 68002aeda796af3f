"""Recipe problems in words.

The words come from the JSON schema of the key, so that a new key needs no new message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.program import in_a_script
from teamtr_lora.common.settings import PATTERN_WORDS, nearest
from teamtr_lora.common.visible import visible_line
from teamtr_lora.recipe.choices import OneOf
from teamtr_lora.recipe.elsewhere import NAMES
from teamtr_lora.recipe.recipe import Recipe
from teamtr_lora.recipe.team_sections import OR_A_BASE
from teamtr_lora.tasks.table import SCRIPT

Node = dict[str, Any]
Loc = tuple[str | int, ...]
MISSING: Any = object()

# Advice that says more than the default value does; * stands for a list index.
_FIX = {
    "trust_region.delta": "try 0.01 (the paper's radius)",
    "base": 'write {"source": ...}',
    "team": "write team: {agents: [{name: solver, role: ...}]}",
    "team.agents": 'write a list of {"name": ..., "role": ...}',
    "team.agents.*": 'write {"name": ..., "role": ...}',
    "team.agents.*.name": "for example planner",
    "team.agents.*.lora.targets": "write all-linear or a list such as [q_proj, v_proj]",
    "task": "write {name: ...}",
    "task.callable": 'write it as "module:function", for example my_env:make_task',
    "task.reward": 'write it as "module:function", for example rewards:exact_match',
}
_ABSENT = {
    "team": ("the recipe has no team", f"add team: {{agents: [{{name: solver, role: ...}}]}}{OR_A_BASE}"),
    "team.agents": ("the team has no agents", f"add at least one {{name, role}}{OR_A_BASE}"),
    "team.agents.*.name": ("the agent has no name", "add one, for example name: planner"),
    "task.callable": ("a custom task needs a function or class that makes it", _FIX["task.callable"]),
    "task.reward": ("a dataset task needs a reward function", _FIX["task.reward"]),
}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "greater than", "maximum": "at most", "exclusiveMaximum": "less than"}
_BOUND_ERRORS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
_TYPES = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false", "null": "null"}


@dataclass(frozen=True)
class Problem:
    """One mistake: `key = value: wrong; fix`, and the nearest valid name where the mistake is a name."""

    key: str
    value: Any
    wrong: str
    fix: str
    suggestion: str | None = None

    def __str__(self) -> str:
        shown = "" if self.value is MISSING else f" = {show(self.value)}"
        meant = f"did you mean {self.suggestion!r}?" if self.suggestion else ""
        return f"{self.key}{shown}: " + "; ".join(part for part in (self.wrong, self.fix, meant) if part)

    def of_a_script(self, told: str) -> Problem:
        """The same for a script that told it to TeamSpec, TeamTRConfig or TeamTRTrainer."""
        key, wrong = of_a_script(self.key).removeprefix("team."), of_a_script(self.wrong)
        fix, meant = of_a_script(self.fix.removesuffix(OR_A_BASE)), self.suggestion
        if meant and meant in own_names().values():
            place = _PLACES.get(meant.partition(".")[0], "TeamTRConfig")
            if place != told:
                note = f" ({fix})" if fix and place != "TeamTRTrainer" else ""  # which is about a recipe's task section
                return Problem(key, self.value, f"is no setting of {told}", f"give {in_a_script(meant)} to {place}{note}")
            meant = meant.removeprefix("team.") if "." in self.key else in_a_script(meant)
        return Problem(key, self.value, wrong, fix, suggestion=meant)


_PLACES = {"base": "TeamSpec", "team": "TeamSpec", "task": "TeamTRTrainer"}  # of a recipe's sections, in a script
LISTED = 50  # problems that are told one by one; a recipe with more has lost its way as a whole
UNTOLD = Problem("another key", MISSING, "is not right", "")  # stands for each of the rest: to explain one takes time


class RecipeError(UserError):
    """All the problems of a recipe: one line if there is one, else a headline and one line each, up to LISTED of them."""

    def __init__(self, problems: Sequence[Problem], source: str = "the recipe") -> None:
        self.problems = list(problems)
        self.source = source
        if len(self.problems) == 1:
            text = visible_line(f"{source}: {self.problems[0]}")
        else:
            lines = [visible_line(str(problem)) for problem in self.problems[:LISTED]]
            more = [f"and {len(self.problems) - LISTED:,} more"] if len(self.problems) > LISTED else []
            text = "\n  ".join([f"{visible_line(source)} has {len(self.problems):,} problems:", *lines, *more])
        super().__init__(text)


def show(value: Any) -> str:
    """A value on one line, as YAML would write it, cut to a readable length."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def key_text(loc: Loc) -> str:
    """The dotted key; parts that would break the line are quoted."""
    return ".".join(str(part) if str(part).isprintable() else repr(part) for part in loc)


def schema_of_recipe() -> Node:
    """As the tables of variants are now, to which a script may add."""
    return _schema_with(OneOf.known())


@cache
def _schema_with(known: tuple[tuple[str, ...], ...]) -> Node:
    return Recipe.model_json_schema()


def resolve(node: Node) -> Node:
    """The node with its $ref, if any, followed."""
    if "$ref" not in node:
        return node
    target: Node = schema_of_recipe()["$defs"][node["$ref"].rsplit("/", 1)[1]]
    return {**target, **{key: value for key, value in node.items() if key != "$ref"}}


def locate(loc: Sequence[str | int]) -> tuple[Loc, Node, Node]:
    """The key path, schema node and parent node of a pydantic error, whose union tags are no part of the path."""
    path: list[str | int] = []
    node: Node = schema_of_recipe()
    parent: Node = {}
    for part in loc:
        if part in node.get("properties", {}):
            node, parent = resolve(node["properties"][part]), node
        elif isinstance(part, int) and "items" in node and "anyOf" not in node:
            node, parent = resolve(node["items"]), node
        elif "oneOf" in node:
            node = next(task for task in map(resolve, node["oneOf"]) if part in task_names(task))
            continue
        elif "anyOf" in node or "prefixItems" in node:
            break
        else:
            node, parent = {}, node
        path.append(part)
    return tuple(path), node, parent


def task_names(task: Node) -> list[str]:
    """The names that select a task section; the first of them is the union's tag for it."""
    name = task["properties"]["name"]
    return list(name["enum"]) if "enum" in name else [name["const"]]


def explain(kind: str, context: dict[str, Any], loc: Loc, node: Node, parent: Node, value: Any) -> Problem:
    """One pydantic error, of type `kind`, as a problem."""
    key, general = key_text(loc), ".".join("*" if isinstance(part, int) else part for part in loc)
    if kind == "rule":
        return Problem(key, MISSING if value is None else value, context["wrong"], context["fix"])
    if kind == "extra_forbidden":
        return _unknown_key(loc, value, parent)
    if kind == "missing" or (general in _ABSENT and value in (None, [])):
        wrong, fix = _ABSENT.get(general, ("is required", node.get("description", "")))
        return Problem(key, MISSING, wrong, fix)
    if kind == "union_tag_invalid":
        names = [name for task in node["oneOf"] for name in task_names(resolve(task))]
        name = value["name"]
        names = [known for known in names if known != SCRIPT]  # made by a Python script, which no file can name
        return Problem("task.name", name, f"must be one of {', '.join(names)}", "", suggestion=nearest(str(name), names))
    choices = _choices(node)
    strange = [word for word in (value if isinstance(value, list) else [value]) if isinstance(word, str) and word not in choices]
    suggestion = nearest(strange[0], choices) if strange else None
    return Problem(key, value, f"must be {_wanted(kind, node)}", _FIX.get(general) or _default(node), suggestion=suggestion)


def _wanted(kind: str, node: Node) -> str:
    if kind in _BOUND_ERRORS:
        branches = [branch for branch in node.get("anyOf", [node]) if branch.get("type") != "null"]
        if len(branches) == 1:
            return _bounds(branches[0])
    if kind == "finite_number":
        return f"finite: {describe(node)}"
    return describe(node)


def describe(node: Node) -> str:
    """What a key takes: 'a whole number, at least 1', 'one of random, fixed, reverse', ..."""
    node = resolve(node)
    if "anyOf" in node:
        parts = [describe(branch) for branch in node["anyOf"] if branch.get("type") != "null"]
        one_or_many = f"{parts[0]} or a list (not empty) of {parts[0]}"
        return " or ".join(parts).replace(one_or_many, f"{parts[0]}, or a list of such")
    if "const" in node:
        return str(node["const"])
    if "enum" in node:
        return f"one of {', '.join(map(str, node['enum']))}"
    if "pattern" in node:
        return PATTERN_WORDS[node["pattern"]]
    if "prefixItems" in node:
        return f"a list of {len(node['prefixItems'])} numbers"
    if node.get("type") == "array":
        items = resolve(node["items"])
        of = f" of {describe(items)}" if items.get("type") != "object" else ""
        return ("a list" if not node.get("minItems") else "a list (not empty)") + of
    if node.get("type") == "object" or "oneOf" in node:
        return "a section (a mapping of keys)"
    words = _TYPES[node["type"]] + (" (not empty)" if node.get("minLength") else "")
    bounds = _bounds(node)
    return f"{words}, {bounds}" if bounds else words


def _bounds(node: Node) -> str:
    return " and ".join(f"{words} {node[bound]}" for bound, words in _BOUNDS.items() if bound in node)


def _default(node: Node) -> str:
    if node.get("type") == "object":
        return "leave the section out to use its defaults"
    return f"the default is {json.dumps(node['default']).strip(chr(34))}" if "default" in node else ""


def _choices(node: Node) -> list[str]:
    branches = [resolve(branch) for branch in node.get("anyOf", [node])]
    branches += [resolve(branch["items"]) for branch in branches if "items" in branch]
    return [choice for branch in branches for choice in [*branch.get("enum", []), branch.get("const")] if isinstance(choice, str)]


def _unknown_key(loc: Loc, value: Any, parent: Node) -> Problem:
    word, known = str(loc[-1]), list(parent.get("properties", {}))
    ours, theirs = own_names(), NAMES.get(word)
    # The best guess first: a key of this section with other separators or a plural, the right name in the wrong section, another
    # library's name, a misspelt key of this section, then one of another section.
    misspelt = nearest(word, known) or ours.get(nearest(word, ours) or "")
    suggestion, fix = ours.get(word) or misspelt, ""
    if own := len(loc) > 1 and nearest(word, known, same_words=True):
        suggestion = own
    elif theirs and ours.get(word, "task.").startswith("task."):
        suggestion, fix = theirs.key, theirs.words(str)
    elif suggestion is None:
        section = key_text(loc[:-1])
        fix = f"the keys {'of ' + section if section else 'here'} are {', '.join(known)}"
    elif loc[0] == "task" and suggestion == f"task.{word}":
        suggestion, fix = None, "it belongs to another task; check task.name"
    hidden = MISSING if isinstance(value, (dict, list)) else value
    return Problem(key_text(loc), hidden, "unknown key", fix, suggestion=suggestion)


@dataclass(frozen=True)
class Key:
    """A key that a recipe may have."""

    name: str  # dotted; * is every element of a list
    takes: str  # in words; empty for a section
    default: str  # as YAML writes it; empty where there is none
    meaning: str
    tasks: tuple[str, ...] = ()  # those it belongs to, where not all have it


def walk(node: Node, prefix: str = "") -> Iterator[Key]:
    """Every key of a section and of what is inside it; those of tasks once for each kind of task."""
    for name, child in node.get("properties", {}).items():
        yield from _walk_key(prefix + name, resolve(child))


def _walk_key(name: str, node: Node) -> Iterator[Key]:
    items, meaning = resolve(node.get("items", {})), node.get("description", "")
    if "oneOf" in node:
        tasks = {tuple(task_names(task)): task for task in map(resolve, node["oneOf"])}
        del tasks[(SCRIPT,)]  # made by a Python script, which no file can name
        yield Key(name, "", "", meaning)
        yield Key(f"{name}.name", f"one of {', '.join(chain(*tasks))}", "", "Which task: see `tasks list`.")
        for names, task in tasks.items():
            yield from (replace(key, tasks=names) for key in walk(task, f"{name}.") if key.name != f"{name}.name")
    elif items.get("properties"):
        yield Key(name, describe(node), "", meaning)
        yield from walk(items, f"{name}.*.")
    elif node.get("properties"):
        yield Key(name, "", "", meaning)
        yield from walk(node, f"{name}.")
    else:
        yield Key(name, describe(node), json.dumps(node["default"]) if "default" in node else "", meaning)


@cache
def own_names() -> dict[str, str]:
    """Each key by its last part; where several have it, that of a section all recipes have wins over a task's and that over an
    agent's, the first over later ones."""
    paths = sorted((key.name for key in walk(schema_of_recipe())), key=lambda path: ("*" in path, path.startswith("task.")))
    return {path.rsplit(".", 1)[-1]: path for path in reversed(paths)}


_WRITTEN = re.compile(r"\b[a-z_]+(?:\.\w+)+(?:=(\[.*?\]|[\w+-]+(?:\.\w+)*))?")


def of_a_script(text: str) -> str:
    """Advice about a recipe's keys, with the names that a script has for them."""

    def written(found: re.Match[str]) -> str:
        key, equals, value = found[0].partition("=")
        if re.sub(r"\.\d+.*", "", key) not in key_paths() and not key.startswith("team.agents."):
            return found[0]
        try:
            return in_a_script(key, json.loads(value) if equals else None)
        except ValueError:  # a word, which YAML writes without quotes
            return in_a_script(key, value)

    return _WRITTEN.sub(written, text)


@contextmanager
def in_their_words(recipe: Recipe) -> Iterator[None]:
    """Errors inside name keys as the user of this recipe writes them."""
    try:
        yield
    except UserError as error:
        if recipe.is_a_scripts:
            error.args = (of_a_script(str(error)),)
        raise


@cache
def key_paths() -> tuple[str, ...]:
    """Every dotted key of the recipe that is not inside a list."""
    return tuple(dict.fromkeys(key.name for key in walk(schema_of_recipe()) if "*" not in key.name))
