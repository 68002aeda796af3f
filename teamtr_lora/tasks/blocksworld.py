"""The blocks world: states, actions with their exact preconditions, and the two ways plans are written.

PDDL actions ((pick-up a), (stack a b)) and PlanBench's phrases (pick up the red block) mean the same four operators; the mystery
domain is the same world under other names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Fact = tuple[str, ...]
COLOURS = ("red", "blue", "orange", "yellow", "white", "magenta", "black", "cyan", "green", "violet", "silver", "gold")
LETTERS = "abcdefghijkl"

# the mystery domain's word for each of ours
MYSTERY = {
    "attack": "pick-up",
    "succumb": "put-down",
    "overcome": "stack",
    "feast": "unstack",
    "province": "clear",
    "planet": "ontable",
    "harmony": "handempty",
    "pain": "holding",
    "craves": "on",
}
ARITY = {"clear": 1, "ontable": 1, "handempty": 0, "holding": 1, "on": 2}


@dataclass(frozen=True)
class Action:
    name: str
    blocks: tuple[str, ...]


def fact(words: Sequence[str]) -> Fact:
    """A fact in our names; raises ValueError for anything else."""
    name, *blocks = (str(word).lower() for word in words)
    name = MYSTERY.get(name, name)
    if ARITY.get(name) != len(blocks):
        raise ValueError(f"{' '.join(map(str, words))!r} is no fact of the blocks world")
    return (name, *blocks)


def apply(state: frozenset[Fact], action: Action) -> frozenset[Fact] | None:
    """The state after an action; None when a precondition does not hold."""
    x, y = action.blocks[0], action.blocks[-1]
    empty, clear, table, held, on = ("handempty",), ("clear", x), ("ontable", x), ("holding", x), ("on", x, y)
    needs: set[Fact]
    new: set[Fact]
    match action.name:  # what each operator needs is also what it takes away
        case "pick-up":
            needs, new = {clear, table, empty}, {held}
        case "put-down":
            needs, new = {held}, {clear, table, empty}
        case "stack":
            needs, new = {("clear", y), held}, {clear, on, empty}
        case _:
            needs, new = {on, clear, empty}, {held, ("clear", y)}
    return (state - needs) | new if needs <= state else None


def achieves(init: Iterable[Fact], goal: Iterable[Fact], plan: Iterable[Action]) -> bool:
    """Whether every action can be done in its turn and the goal holds at the end."""
    state: frozenset[Fact] | None = frozenset(init)
    for action in plan:
        assert state is not None
        state = apply(state, action)
        if state is None:
            return False
    return state is not None and set(goal) <= state


_BLOCK = r"(?:the\s+)?(?:object\s+|block\s+)?([a-z0-9_]+)(?:\s+block)?"
_PHRASES = [
    (name, re.compile(pattern.replace("X", _BLOCK).replace("Y", _BLOCK).replace(" ", r"\s+")))
    for name, pattern in (
        ("pick-up", r"(?:pick(?:-|_|\s)?up|attack) X(?: from the table)?"),
        ("put-down", r"(?:put(?:-|_|\s)?down|succumb) X(?: on the table)?"),
        ("stack", r"stack X (?:on top of|onto|on) Y"),
        ("stack", r"(?:stack|overcome) X Y"),
        ("stack", r"overcome X from Y"),
        ("unstack", r"unstack X (?:from on top of|from|off) Y"),
        ("unstack", r"(?:unstack|feast) X Y"),
        ("unstack", r"feast X from Y"),
    )
]
_VERB = re.compile(r"(?:pick|put|stack|unstack|attack|succumb|overcome|feast)(?:\b|_)")
_BULLET = re.compile(r"^(?:[-*•>]|\d+\.\d+:|\(?\d+[.):]|\d+\s+-\s|step\s+\d+[.:)]?|action\s+\d+[.:)]?)\s*")
_LEAD = re.compile(r"^(?:(?:first|second|third|then|next|now|finally|lastly|after that|and|i|we)\b[,:]?\s*)+")
_CALL = re.compile(r"([a-z][a-z_-]*)\s*\(([^()]*)\)")
LONGEST_LINE = 200
MOST_ACTIONS = 2_000


def plan_text(response: str) -> str:
    """What stands between the plan's markers, or all of it without any. The prompt ends in [PLAN], so a lone end counts."""
    text = response.lower()
    opened = text.rfind("[plan]")
    text = text[opened + len("[plan]") :] if opened >= 0 else text
    for end in ("[plan end]", "[end plan]", "[/plan]", "[statement]"):
        text = text.partition(end)[0]
    return text


def parse_plan(response: str, names: dict[str, str]) -> list[Action] | None:
    """The actions of a response, blocks by the letters that `names` maps them to. Prose between them is passed over; None when a
    line starts like an action and is none, or names a block that is not there, or when there is no plan at all."""
    text = plan_text(response)
    plan: list[Action] = []
    for line in text.splitlines():
        for part in _parts(line):
            action = _action(part, names)
            if action is None:
                return None
            plan.append(action)
            if len(plan) > MOST_ACTIONS:
                return None
    return plan or None


def _parts(line: str) -> list[str]:
    """The pieces of a line that are, or start like, an action."""
    line = _BULLET.sub("", line.strip().strip("`*_ \t")).strip("`*_ \t")
    if line.startswith("("):
        parts = [part.replace(",", " ").strip() for part in re.findall(r"\(([^()]{,200})\)", line)]
        return [part for part in parts if _VERB.match(part)]
    if len(line) > LONGEST_LINE:
        return []
    line = _LEAD.sub("", line.rstrip(".,;:!"))
    if called := _CALL.fullmatch(line):
        line = f"{called[1]} {called[2].replace(',', ' ').strip()}"
    return [line] if _VERB.match(line) else []


def _action(text: str, names: dict[str, str]) -> Action | None:
    for name, pattern in _PHRASES:
        found = pattern.fullmatch(text)
        if found and all(word in names for word in found.groups()):
            return Action(name, tuple(names[word] for word in found.groups()))
    return None


def block_names(blocks: Iterable[str]) -> dict[str, str]:
    """Every way to name a block: its letter, and the colour that PlanBench gives the letter."""
    names: dict[str, str] = {}
    for block in (str(b).lower() for b in blocks):
        names[block] = block
        if block in LETTERS:
            names.setdefault(COLOURS[LETTERS.index(block)], block)
    return names
