"""Items and responses that are not as they should be: one line that names the file, the row and the field, no traceback."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe.task_by_name import task_settings
from teamtr_lora.tasks.machinery.bench import BenchTask
from teamtr_lora.tasks.machinery.recorded import said_turns
from teamtr_lora.tasks.machinery.score import play, read_items, score_file, total_rewards

BAD: list[Any] = [5, None, [], {}, "x", [5], {"a": 5}, [[5]], [{"a": 5}], True, -1, "", "\ud800", [None], {"name": 5}]
ACTION = {"name": "get_user_details", "arguments": {"user_id": "a"}, "compare_args": None, "requestor": "assistant"}
START = {
    "initialization_data": {"agent_data": {"users": {"a": {"name": "b"}}}},
    "initialization_actions": [{"func_name": "calculate"}],
}
PEOPLE = [{"name": "Ann", "introduction": "i"}, {"name": "Bob", "introduction": "i"}]
VICTIM = {"name": "Cid", "introduction": "i", "cause_of_death": "c", "murder_weapon": "w"}
CAST = {name: {"name": name, "task": "t", "story": "s"} for name in ("Ann", "Bob")}
FACTS = {"init": [["handempty"], ["ontable", "a"], ["clear", "a"]], "goal": [["holding", "a"]]}
CODE = {"Inputs_Check_code": "def inputs_check(x):\n    return True", "Constraint_List_code": "constraint_list = []"}
CRITERIA = {"actions": [ACTION], "communicate_info": ["1"], "nl_assertions": ["n"], "reward_basis": ["DB"]}
TAU2 = {"scenario": "s", **CRITERIA, "initial_state": START}
ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [
        {"question": "q", "answer": "1"},
        {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "1"}},
    ],
    "math500": [{"problem": "q", "answer": "1"}, {"prompt": "p", "data": {"answer": "1", "problem": "q"}}],
    "aime24": [{"problem": "q", "answer": "1"}, {"prompt": "p", "data": {"answer": "1"}}],
    "zebralogic": [
        {"puzzle": "p", "solution": {"header": ["House", "Name"], "rows": [["1", "Ann"]]}},
        {"prompt": "p", "data": {"header": ["House", "Name"], "rows": [["1", "Ann"]]}},
    ],
    "autologi": [
        {"prompt": "p", "code": CODE},
        {"puzzle": "p", "inputs_check": CODE["Inputs_Check_code"], "constraints": ["def c(x):\n    return True"]},
        {"prompt": "p", "data": {"check": "c", "constraints": "c"}},
    ],
    "arbench_gn": [{"number": "0123"}, {"prompt": "p", "data": {"number": "0123"}}],
    "arbench_sp": [{"surface": "s", "bottom": "b"}, {"prompt": "p", "data": {"surface": "s", "bottom": "b"}}],
    "arbench_dc": [
        {
            "initial_information": {"time": "t", "location": "l", "victim": VICTIM, "suspect": PEOPLE},
            "suspects": list(CAST.values()),
            "label": 1,
        },
        {"prompt": "p", "data": {"label": 1, "names": ["Ann", "Bob"], "cast": CAST, "letters": "A or B"}},
    ],
    "planbench_blocksworld": [{"objects": ["a"], "query": "q", **FACTS}, {"prompt": "p", "data": {"objects": ["a"], **FACTS}}],
    "tau2_retail": [
        {
            "user_scenario": {"persona": None, "instructions": {"domain": "r"}},
            "initial_state": START,
            "evaluation_criteria": CRITERIA,
        },
        {"prompt": "p", "data": TAU2},
    ],
    "countdown": [{"prompt": "p", "data": {"numbers": [1, 2], "target": 3}}],
    "distinct": [{"prompt": "p", "data": {"options": [1, 2]}}],
    "arithmetic": [{"prompt": "p", "data": {"answer": "3"}}],
    "column_sum": [{"prompt": "p", "data": {"totals": [1, 2, 3], "answer": "321"}}],
}
SAID = {
    "zebralogic": ['{"solution": {"House 1": {"Name": "Ann"}}}'],
    "arbench_dc": ["Suspect: Ann\nQuestion: Who?", "Answer: B"],
    "planbench_blocksworld": ["(pick-up a)"],
    "tau2_retail": [json.dumps({"name": "get_user_details", "arguments": {"user_id": "a"}}), "It is 1."],
    "autologi": ["nothing"],  # no program needs to run here
}
USUAL = ["\\boxed{1}", "Guess: 0123", "1+2", "7+5+0=12"]


def spoilt(value: Any) -> Iterator[Any]:
    """Copies with one field, at any depth, replaced or left out."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        for other in BAD:
            changed = copy.copy(value)
            changed[key] = other
            yield changed
        if isinstance(value, dict):
            yield {name: inner for name, inner in value.items() if name != key}
        if isinstance(value[key], (dict, list)):
            for inner in spoilt(value[key]):
                changed = copy.copy(value)
                changed[key] = inner
                yield changed


def tau2_files(folder: Path) -> None:
    (folder / "retail_db.json").write_text((Path(__file__).parents[1] / "benchmarks" / "tau2_tables.json").read_text())
    tables = json.loads((folder / "retail_db.json").read_text())
    (folder / "retail_db.json").write_text(json.dumps(tables["retail"]))
    (folder / "retail_policy.md").write_text("policy")


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_spoilt_item_is_named_or_scored(name: str, tmp_path: Path) -> None:
    tau2_files(tmp_path)
    task = task_settings(name, (), tmp_path / "items.jsonl").make(tmp_path)
    task.use_recorded()
    said, refused, tried = SAID.get(name, USUAL), 0, 0
    for row in ROWS[name]:
        read_items(task, [row], "file")  # as it is, it is one
        for changed in spoilt(row):
            tried += 1
            try:
                items = list(read_items(task, [changed], "file")[0].values())
                episodes = [play(task, item, said) for item in items]
                assert all(0 <= reward <= 1 for reward in total_rewards(task, episodes))
                left_out = isinstance(task, BenchTask) and task.lost_answer(changed)
                assert left_out != bool([task.measures(episode) for episode in episodes])
            except UserError as error:
                refused += 1
                assert str(error).startswith("file row 1: item 0: ") and "\n" not in str(error), error
                assert len(str(error)) < 400
    assert tried >= 15 and refused >= tried / 4, (tried, refused)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("planbench_blocksworld", {"objects": 5, **FACTS}, "objects = 5: should be a valid list"),
        ("zebralogic", {"puzzle": "p", "solution": {"header": ["House", "a"], "rows": [5]}}, "solution: rows.0 = '5': should be"),
        ("zebralogic", {"puzzle": "p", "solution": {"header": ["House"], "rows": [["1"]]}}, "solution: header = "),
        ("zebralogic", {"prompt": "p", "data": {"header": ["House"], "rows": [["1"]]}}, "data: header = "),
        ("arbench_gn", {"number": [1]}, r"number = \[1\] is not text or a whole number"),
        ("aime25", {"problem": "q", "answer": "x"}, "answer = 'x' is no integer"),
        ("countdown", {"prompt": "p", "data": {"numbers": 5, "target": 3}}, "data: numbers = 5"),
        ("gsm8k", {"id": [1], "question": "q", "answer": "1"}, r"id = \[1\] is neither text nor a number"),
    ],
)
def test_the_file_the_row_and_the_field_are_named(name: str, row: dict[str, Any], message: str, tmp_path: Path) -> None:
    items, responses = tmp_path / "items.jsonl", tmp_path / "said.jsonl"
    items.write_text(json.dumps(row))
    responses.write_text(json.dumps({"id": 0, "response": "x"}))
    with pytest.raises(UserError, match=rf"^--items = '.*items.jsonl' row 1: .*{message}"):
        score_file(task_settings(name, (), items), items, responses)


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"response": "a"}, ["a"]),
        ({"response": ""}, [""]),
        ({"response": {"role": "assistant", "content": "a"}}, ["a"]),
        ({"response": ["a", "b"]}, ["a", "b"]),
        ({"response": None, "messages": ["a"]}, ["a"]),
        ({"messages": []}, []),
        ({"messages": [{"role": "user", "content": "u"}, {"role": "agent", "content": "a"}, {"content": "b"}]}, ["a", "b"]),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            ["ab"],
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, [""]),
        ({"messages": [{"role": "tool", "content": [{"odd": 1}]}, "a"]}, ["a"]),
    ],
)
def test_what_the_agent_said_is_read_as_chat_apis_write_it(row: dict[str, Any], turns: list[str]) -> None:
    assert said_turns(row, "w") == turns


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "w: has neither response"),
        ({"response": None}, 'w: response is null; write "" for'),
        ({"response": 5}, "w: message 1: 5 is neither text nor"),
        ({"messages": "a"}, "w: messages = 'a' is no list"),
        ({"messages": ["a", 5]}, "w: message 2: 5 is neither text nor"),
        ({"messages": [{"role": "boss", "content": "a"}]}, "w: message 1: role = 'boss' is unknown"),
        ({"messages": [{"role": "assistant"}]}, "w: message 1: has neither content nor tool_calls"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image_url"}]}]}, "w: message 1: content = .* is neither text"),
    ],
)
def test_what_nobody_can_have_said_is_one_line(row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        said_turns(row, "w")


@pytest.mark.parametrize(
    "call",
    [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "assistant", "name": "f", "arguments": {"a": 1}},
    ],
)
def test_recorded_calls_are_calls(call: dict[str, Any]) -> None:
    from teamtr_lora.team.tool_calls import ToolCall, read_calls

    assert read_calls(said_turns({"messages": [call]}, "w")[0], ["f"])[0] == [ToolCall("f", {"a": 1})]
