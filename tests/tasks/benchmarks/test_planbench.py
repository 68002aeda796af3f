"""The blocks world: the simulator against another one and against search, how plans are written, PlanBench's own items."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.benchmarks.blocksworld import COLOURS, LETTERS, Action, Fact, achieves, apply, block_names, parse_plan
from teamtr_lora.tasks.benchmarks.planbench import Blocksworld, arrangement
from teamtr_lora.tasks.machinery.task import Item, Task

Score = Callable[[Task, Sequence[tuple[Item, str]]], list[float]]
Towers = list[list[str]]
WORDS = {
    "pick-up": "pick up the {} block",
    "put-down": "put down the {} block",
    "stack": "stack the {} block on top of the {} block",
    "unstack": "unstack the {} block from on top of the {} block",
}
MYSTERY = {"pick-up": "attack", "put-down": "succumb", "stack": "overcome", "unstack": "feast"}


def actions(blocks: str) -> list[Action]:
    one = [Action(name, (x,)) for name in ("pick-up", "put-down") for x in blocks]
    return one + [Action(name, (x, y)) for name in ("stack", "unstack") for x in blocks for y in blocks]


def move(towers: Towers, hand: str | None, action: Action) -> tuple[Towers, str | None] | None:
    """The same world as lists of towers, written without looking at facts."""
    x, y = action.blocks[0], action.blocks[-1]
    towers = [list(tower) for tower in towers]
    if action.name in ("pick-up", "unstack"):
        for tower in towers:
            if hand is None and tower[-1] == x and (tower == [x] if action.name == "pick-up" else tower[-2:] == [y, x]):
                tower.pop()
                return [t for t in towers if t], x
        return None
    if hand != x:
        return None
    if action.name == "put-down":
        return [*towers, [x]], None
    for tower in towers:
        if tower[-1] == y:
            tower.append(x)
            return towers, None
    return None


def facts_of(towers: Towers, hand: str | None) -> set[Fact]:
    facts = set(arrangement(towers))
    return facts if hand is None else (facts - {("handempty",)}) | {("holding", hand)}


@pytest.mark.parametrize("seed", range(30))
def test_every_action_agrees_with_another_simulator(seed: int) -> None:
    rng = random.Random(seed)
    blocks = LETTERS[: rng.randint(2, 6)]
    towers, hand = [[b] for b in blocks], None
    for _ in range(40):
        state = frozenset(facts_of(towers, hand))
        possible = []
        for action in actions(blocks):
            after, expected = apply(state, action), move(towers, hand, action)
            assert (after is None) == (expected is None), action
            if expected is not None:
                assert after == facts_of(*expected)
                possible.append(expected)
        towers, hand = rng.choice(possible)


def shortest(init: Sequence[Fact], goal: Sequence[Fact], blocks: str) -> list[Action]:
    start = frozenset(init)
    seen: dict[frozenset[Fact], list[Action]] = {start: []}
    todo = deque([start])
    while todo:
        state = todo.popleft()
        if set(goal) <= state:
            return seen[state]
        for action in actions(blocks):
            after = apply(state, action)
            if after is not None and after not in seen:
                seen[after] = [*seen[state], action]
                todo.append(after)
    raise AssertionError("no plan")


@pytest.mark.parametrize("mystery", [False, True])
def test_generated_items_have_plans_and_spoilt_plans_fail(mystery: bool, score: Score) -> None:
    task = Blocksworld(4, mystery)
    for position in range(12):
        item = task.items("train")[position]
        plan = shortest(item.data["init"], item.data["goal"], LETTERS[:4])
        assert plan
        texts = [written(plan, "mystery" if mystery else "phrases"), written(plan, "pddl")]
        assert score(task, [(item, text) for text in texts]) == [1.0, 1.0]
        dropped = [written(plan[:i] + plan[i + 1 :], "phrases") for i in range(len(plan))]  # shorter than the shortest
        assert set(score(task, [(item, text) for text in dropped])) == {0.0}


def written(plan: Sequence[Action], how: str) -> str:
    lines = []
    for action in plan:
        colours = [COLOURS[LETTERS.index(b)] for b in action.blocks]
        if how == "phrases":
            lines.append(WORDS[action.name].format(*colours))
        elif how == "mystery":
            lines.append(f"{MYSTERY[action.name]} {' from '.join(f'object {b}' for b in action.blocks)}")
        else:
            lines.append(f"({action.name} {' '.join(action.blocks)})")
    return "[PLAN]\n" + "\n".join(lines) + "\n[PLAN END]"


def test_difficulty_grows_and_seeds_reproduce_and_splits_are_apart() -> None:
    lengths = []
    for blocks in (2, 3, 4, 5):
        items = [Blocksworld(blocks).items("train")[i] for i in range(8)]
        lengths.append(sum(len(shortest(i.data["init"], i.data["goal"], LETTERS[:blocks])) for i in items))
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    task = Blocksworld(4)
    assert task.items("test")[5] == Blocksworld(4).items("test")[5]
    keys = {split: {task.text(task.items(split)[i]) for i in range(150)} for split in ("train", "test")}  # type: ignore[arg-type]
    assert not keys["train"] & keys["test"]


RIGHT = ["(pick-up a)\n(stack a b)", "pick up the red block\nstack the red block on top of the blue block"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (RIGHT[0], 2),
        (RIGHT[1], 2),
        (f"Let me think: stack it.\n[PLAN]\n{RIGHT[1]}\n[PLAN END]\nstack the red block", 2),
        (f"{RIGHT[1]}\n[PLAN END]\n[STATEMENT]\nput down the red block", 2),
        ("1. Pick up the red block.\n2) Stack the red block on the blue block", 2),
        ("- `(pick-up a)`\n- **(stack a b)**", 2),
        ("(pick-up red) (stack red blue)", 2),
        ("(PICK-UP A)\nI then do this:\nSTACK A B", 2),
        ("attack object a\novercome object a from object b", 2),
        ("(attack a)\n(overcome a b)", 2),
        ("feast object a from object b\nsuccumb object a", 2),
        (f"[PLAN]\n{RIGHT[1]}\n[PLAN END]\nThat is all between [PLAN] and [PLAN END].", 2),
        (f"I write it after [PLAN].\n[PLAN]\n{RIGHT[0]}", 2),
        (f"[PLAN]\n(put-down a)\n[PLAN END]\nNo:\n[PLAN]\n{RIGHT[0]}\n[PLAN END]", 2),
        ("attack object_a\novercome object_a from object_b", 2),
        ("(attack object_a)\n(overcome object_a object_b)", 2),
        ("pick up the red_block\nstack block a on block b", 2),
        ("Pick up the red block (it is clear).\nStack the red block on the blue block, so the hand is empty.", 2),
        ("pick up the red block, then stack the red block on top of the blue block", 2),
        ("**Action:** pick up the red block\n**Action:** stack red on blue", 2),
        ("Step 1: Pick the red block up\nStep 2: put the red block down on the table", 2),
        (f"I pick up the red block, it is clear.\n\n### Plan:\n{RIGHT[1]}", 2),
        (f"Pick up the red block first.\n```\n{RIGHT[0]}\n```", 2),
        ("pick up the red block (or pick up the blue block)", None),
        ("pick up the green block", None),
        ("stack the red block", None),
        ("(stack a)", None),
        ("(fly a b)", None),
        ("pick up", None),
        ("", None),
        ("I give up", None),
    ],
)
def test_plans_are_read_in_all_their_spellings(text: str, count: int | None) -> None:
    plan = parse_plan(text, block_names(["a", "b"]))
    assert (None if plan is None else len(plan)) == count


PLAN = ["unstack the blue block from on top of the orange block", "put down the blue block"]


@pytest.mark.parametrize(
    "text",
    [
        "First, {0}.\nThen, {1}.", "I {0}\nFinally, I {1}", "1 - {0}\n2 - {1}", "{0}\n{1} on the table",
        "unstack(blue, orange)\nput_down(blue)", "(unstack blue, orange)\n(put-down blue)",
        "0.000: (unstack blue orange) [1.000]\n1.000: (put-down blue) [1.000]", "(This is the plan)\n{0}\n{1}",
    ],
)  # fmt: skip
def test_plans_are_read_as_people_write_them(text: str) -> None:
    names = {"blue": "a", "orange": "b"}
    assert parse_plan(text.format(*PLAN), names) == [Action("unstack", ("a", "b")), Action("put-down", ("a",))]


def test_a_further_action_is_not_passed_over_for_the_word_before_it() -> None:
    names = {"blue": "a", "orange": "b"}
    plan = parse_plan("\n".join([*PLAN, "then unstack the orange block from on top of the blue block"]), names)
    assert plan is not None and len(plan) == 3


def test_a_long_line_of_actions_is_read() -> None:
    assert len(parse_plan("(pick-up blue) (put-down blue) " * 20, {"blue": "a"}) or []) == 40


def test_rows_that_are_no_instances_are_named() -> None:
    with pytest.raises(UserError, match="item x: init = .*: 'flying a' is no fact"):
        Blocksworld().row_item({"init": [["flying", "a"]], "goal": [["on", "a", "b"]]}, "x")
    with pytest.raises(UserError, match="item x: 'on a b' has blocks that objects has not: 'b'"):
        Blocksworld().row_item({"objects": ["a"], "init": [["clear", "a"]], "goal": [["on", "a", "b"]]}, "x")
    with pytest.raises(UserError, match="item x: objects = 5: should be a valid list"):
        Blocksworld().row_item({"objects": 5, "init": [["clear", "a"]], "goal": [["clear", "a"]]}, "x")
    with pytest.raises(UserError, match="item x: has no goal"):
        Blocksworld().row_item({"init": [["harmony"]]}, "x")


@settings(max_examples=200, deadline=None)
@given(
    st.text()
    | st.lists(st.sampled_from(["(", ")", "pick-up ", "a", " b", "\n", "stack ", "[plan]", "[plan end]", "red"])).map("".join)
)
def test_no_text_crashes_it(text: str) -> None:
    plan = parse_plan(text, block_names(["a", "b"]))
    assert plan is None or {block for action in plan for block in action.blocks} <= {"a", "b"}


@pytest.mark.parametrize("part", ["(", "(pick-up a)\n", "pick up the red block ", "[plan]", "```\n", "\x00", "\ud800", "- "])
def test_a_megabyte_is_read(part: str) -> None:
    plan = parse_plan(part * (10**6 // len(part)), block_names(["a", "b"]))
    assert plan is None or len(plan) > 1


@pytest.mark.parametrize("name", ["planbench/blocksworld_task1", "planbench/blocksworld_3_task1"])
def test_reference_plans_are_right_and_spoilt_ones_wrong(bench: Any, score: Score, name: str) -> None:
    task = Blocksworld()
    spoilt = []
    for row in bench(name):
        item = task.row_item(row, str(row["id"]))
        lines = row["ground_truth_plan"].split("\n")[:-1]
        plan = parse_plan(row["ground_truth_plan"], block_names(row["objects"]))
        assert plan is not None and len(plan) == len(lines)
        assert score(task, [(item, row["ground_truth_plan"]), (item, written(plan, "phrases"))]) == [1.0, 1.0]
        spoilt += [(item, "\n".join(lines[:i] + lines[i + 1 :])) for i in range(len(lines))]
        spoilt += [(item, "\n".join([*lines[:i], lines[i + 1], lines[i], *lines[i + 2 :]])) for i in range(len(lines) - 1)]
        assert not achieves(item.data["init"], item.data["goal"], [])
    found = score(task, spoilt)
    assert [text for (_, text), right in zip(spoilt, found, strict=True) if right] == []


def test_unified_planning_agrees() -> None:
    """A check against somebody else's simulator, where that is installed."""
    up = pytest.importorskip("unified_planning.shortcuts", reason="unified-planning is a development tool only")
    from unified_planning.shortcuts import (
        And,
        BoolType,
        Fluent,
        InstantaneousAction,
        Not,
        Object,
        Problem,
        SequentialSimulator,
        UserType,
    )

    up.get_environment().credits_stream = None
    kind = UserType("block")
    fluents = {
        n: Fluent(n, BoolType(), **{f"p{i}": kind for i in range(k)})
        for n, k in (("clear", 1), ("ontable", 1), ("handempty", 0), ("holding", 1), ("on", 2))
    }
    table = {
        "pick-up": (["clear x", "ontable x", "handempty"], ["holding x"], ["clear x", "ontable x", "handempty"]),
        "put-down": (["holding x"], ["clear x", "ontable x", "handempty"], ["holding x"]),
        "stack": (["clear y", "holding x"], ["handempty", "clear x", "on x y"], ["clear y", "holding x"]),
        "unstack": (["on x y", "clear x", "handempty"], ["holding x", "clear y"], ["on x y", "clear x", "handempty"]),
    }
    blocks = "abc"
    things = {b: Object(b, kind) for b in blocks}
    problem = Problem("blocks")
    for fluent in fluents.values():
        problem.add_fluent(fluent, default_initial_value=False)
    problem.add_objects(things.values())
    for name, (needs, new, gone) in table.items():
        action = InstantaneousAction(name, **({"x": kind} if name in ("pick-up", "put-down") else {"x": kind, "y": kind}))

        def expression(text: str, action: Any = action) -> Any:
            word, *args = text.split()
            return fluents[word](*[action.parameter(a) for a in args])

        for text in needs:
            action.add_precondition(expression(text))
        for text in gone:
            action.add_effect(expression(text), False)
        for text in new:
            action.add_effect(expression(text), True)
        problem.add_action(action)
    init = arrangement([["a", "b"], ["c"]])
    for word, *args in init:
        problem.set_initial_value(fluents[word](*[things[a] for a in args]), True)
    problem.add_goal(And(Not(fluents["handempty"]())))
    rng = random.Random(0)
    with SequentialSimulator(problem) as simulator:
        theirs, ours = simulator.get_initial_state(), frozenset(init)
        for _ in range(30):
            possible = []
            for action in actions(blocks):
                after = apply(ours, action)
                applied = simulator.apply(theirs, problem.action(action.name), [things[b] for b in action.blocks])
                assert (after is None) == (applied is None), action
                if after is not None:
                    possible.append((applied, after))
            theirs, ours = rng.choice(possible)
