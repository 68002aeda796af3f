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
    name, *blocks = (str(word).lower() for word in words or ("",))
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


_BLOCK = r"(?:the\s+)?(?:object(?:\s+|_)|block(?:\s+|_))?([a-z0-9_]+?)(?:(?:\s+|_)block)?"
_PHRASES = [
    (name, re.compile(pattern.replace("X", _BLOCK).replace("Y", _BLOCK).replace(" ", r"\s+")))
    for name, pattern in (
        ("pick-up", r"(?:pick(?:-|_|\s)?up|attack) X(?: from the table)?|pick X up"),
        ("put-down", r"(?:put(?:-|_|\s)?down|succumb) X(?: on(?:to)? the table)?|put X down(?: on(?:to)? the table)?"),
        ("stack", r"stack X (?:on top of|onto|on) Y"),
        ("stack", r"(?:stack|overcome) X Y"),
        ("stack", r"overcome X from Y"),
        ("unstack", r"unstack X (?:from on top of|from the top of|from top of|from|off of|off) Y"),
        ("unstack", r"(?:unstack|feast) X Y"),
        ("unstack", r"feast X from Y"),
    )
]
_VERBS = r"(?:pick|put|stack|unstack|attack|succumb|overcome|feast)(?:\b|_)"
_VERB = re.compile(_VERBS)
_BULLET = re.compile(
    r"^(?:[-*•>]|\d+\.\d+:|\(?\d+[.):]|\d+\s+-\s|(?:step|action)(?:\s+\d+)?[.:)]*(?=\W))[\s*]*(?:action:[\s*`]*)?"
)
_LEAD = re.compile(r"^(?:(?:first|second|third|then|next|now|finally|lastly|after that|and|i|we)\b[,:]?\s*)+")
_CALL = re.compile(r"([a-z][a-z_-]*)\s*\(([^()]*)\)")
_NEXT = re.compile(
    rf"\s*(?:[,;.]\s*(?:and\s+)?(?:then\s+)?|\s(?:and\s+)?then\s|\sand\s)\s*(?={_VERBS})"
)  # another action in the line
_REMARK = re.compile(r"\s*(?:[(;,:#→*`]|\s-+>?\s|\.\s|\s(?:so|since|because|which|to)\s).*")  # what is said of an action
_ENDS = re.compile(r"\[plan[ _]end\]|\[end[ _](?:of[ _])?plan\]|\[/plan\]|\[statement\]")
_FENCE = re.compile(r"```[a-z]*[ \t]*\n(.*?)```", re.DOTALL)
_TITLE = re.compile(r"^[^\w\n]{0,20}(?:the )?(?:final )?plan(?: of actions)?[^\w\n]{0,20}$", re.MULTILINE)
MOST_MARKERS = 20
LONGEST_LINE = 200
MOST_ACTIONS = 2_000


def plan_text(response: str) -> str:
    """The plan alone: between the last markers with an action between them, in the last code fence with one, after a title, or
    all of it. The prompt ends in [PLAN], so a lone end counts; and what comes after a plan may speak of its markers."""
    before, *opened = response.lower().split("[plan]")
    if opened:
        marked = [_ENDS.split(part, maxsplit=1)[0] for part in opened[-MOST_MARKERS:]]
        return next((part for part in reversed(marked) if _has_actions(part)), marked[-1])
    text = _ENDS.split(before, maxsplit=1)[0]
    for parts in (_FENCE.findall(text), _TITLE.split(text)[1:]):
        found = next((part for part in reversed(parts[-MOST_MARKERS:]) if _has_actions(part)), None)
        if found is not None:
            return str(found)
    return text


def _has_actions(text: str) -> bool:
    return any(_parts(line) for line in text.splitlines())


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
    if not _VERB.match(line):
        return []
    if called := _CALL.fullmatch(line):
        return [f"{called[1]} {called[2].replace(',', ' ').strip()}"]
    return _NEXT.split(line)


def _action(text: str, names: dict[str, str]) -> Action | None:
    bare = _REMARK.sub("", text)
    for form in (text,) if _VERB.search(text, len(bare)) else (text, bare):  # a remark that speaks of an action may be one
        for name, pattern in _PHRASES:
            found = pattern.fullmatch(form.strip("`*_ \t"))
            words = [word for word in found.groups() if word is not None] if found else []
            if words and all(word in names for word in words):
                return Action(name, tuple(names[word] for word in words))
    return None


def block_names(blocks: Iterable[str]) -> dict[str, str]:
    """Every way to name a block: its letter, the colour that PlanBench gives the letter, what stands after object_ or block_."""
    names = {block: block for block in (str(b).lower() for b in blocks)}
    for block in list(names):
        if block in LETTERS:
            names.setdefault(COLOURS[LETTERS.index(block)], block)
        short = re.fullmatch(r"(?:object_|block_|[bo](?=\d))(\w+)", block)  # PlanBench writes o1 as object_1
        if short:
            names.setdefault(short[1], block)
    return names
