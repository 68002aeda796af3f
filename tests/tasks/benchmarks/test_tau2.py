"""tau2: rewards by what the database holds and what was said, conversations with a customer, and the benchmark's own tasks."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teamtr_lora.cli import main
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe.task_by_name import task_settings
from teamtr_lora.tasks.benchmarks.tau2 import Tau2Task, all_met
from teamtr_lora.tasks.benchmarks.tau2_files import DomainFiles
from teamtr_lora.tasks.machinery.responder import Responder, Scripted, Silent, Turn
from teamtr_lora.tasks.machinery.task import Item, Task
from teamtr_lora.team import Episode

Played = Callable[[Task, Item, Sequence[str]], Episode]
TABLES = json.loads(Path(__file__).with_name("tau2_tables.json").read_text())
HOME = TABLES["retail"]["users"]["ada_1"]["address"]
CANCEL = {"name": "cancel_pending_order", "arguments": {"order_id": "#W1", "reason": "no longer needed"}}
MOVE = {"name": "modify_user_address", "arguments": {"user_id": "ada_1", **HOME, "city": "Oslo"}}
LOOK = {"name": "get_order_details", "arguments": {"order_id": "#W1"}}


def row(actions: Any = (LOOK, CANCEL, MOVE), basis: Any = ("DB", "COMMUNICATE"), **criteria: Any) -> dict[str, Any]:
    told = {"domain": "retail", "reason_for_call": "Cancel it.", "known_info": "You are Ada.", "task_instructions": "Be kind."}
    actions = None if actions is None else list(actions)
    wanted = {"actions": actions, "communicate_info": ["1045.5"], "reward_basis": list(basis)}
    return {
        "id": "0",
        "user_scenario": {"persona": None, "instructions": told},
        "initial_state": None,
        "evaluation_criteria": {"nl_assertions": ["Agent should say 1,045.5.", "Agent should be kind."], **wanted, **criteria},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tau2")
    for name, tables in TABLES.items():
        (path / f"{name}_db.json").write_text(json.dumps(tables))
        (path / f"{name}_policy.md").write_text(f"# {name} policy\nBe {{kind}}.\n")
    (path / "tasks.json").write_text(json.dumps([row() | {"id": str(n)} | scenario(n) for n in range(6)]))
    (path / "retail_split.json").write_text(json.dumps({"train": ["0", "2", "4", "9"], "test": ["1", "3"], "base": []}))
    return path


def scenario(number: int) -> dict[str, Any]:
    return {"user_scenario": {"persona": f"number {number}", "instructions": "Cancel it."}}


def make(folder: Path, responder: Responder | None = None, domain: str = "retail", **settings_: Any) -> Tau2Task:
    return Tau2Task(f"tau2_{domain}", DomainFiles(domain, folder), responder or Silent(), **settings_)


def say(*calls: Any) -> list[str]:
    return [call if isinstance(call, str) else json.dumps(call) for call in calls]


def reward(task: Tau2Task, played: Played, item: Item, *said: Any) -> float:
    return task.score([played(task, item, say(*said))])[0]


def test_the_database_at_the_end_and_what_was_said_decide(folder: Path, played: Played) -> None:
    task = make(folder)
    item = task.row_item(row(), "0")
    told = "You get $1,045.50 back."
    right = [
        (LOOK, CANCEL, MOVE, told),
        (MOVE, CANCEL, told),  # reading changes nothing, and the order does not matter here
        (told, MOVE, CANCEL),
        (LOOK | {"arguments": {"order_id": "nope"}}, CANCEL, MOVE, told),
        (CANCEL, CANCEL, MOVE, told),  # the second is refused and changes nothing
        (f"{json.dumps(CANCEL)}\n{json.dumps(MOVE)}", told),
        (f"```json\n{json.dumps({'tool': CANCEL['name'], 'args': CANCEL['arguments']})}\n```", MOVE, told),
        (f"<think>{json.dumps(LOOK)}</think>{json.dumps(CANCEL)}", MOVE, f"<think>so</think>{told}"),
        (json.dumps(CANCEL) + " " + told, MOVE),
    ]
    assert [reward(task, played, item, *said) for said in right] == [1.0] * len(right)
    wrong: list[tuple[Any, ...]] = [
        (),
        (told,),
        (CANCEL, told),
        (MOVE, told),
        (CANCEL, MOVE),
        (CANCEL, MOVE, "You get $1,045 back."),
        (CANCEL, MOVE, f"<think>{told}</think>Done."),
        (CANCEL, MOVE, json.dumps(LOOK | {"arguments": {"order_id": told}})),  # a call is not said to the customer
        (CANCEL | {"arguments": {"order_id": "#W1", "reason": "ordered by mistake"}}, MOVE, told),
        (CANCEL | {"arguments": {"order_id": "#W3", "reason": "no longer needed"}}, MOVE, told),
        (CANCEL, MOVE | {"arguments": {**MOVE["arguments"], "zip": "2"}}, told),  # type: ignore[dict-item]
        (CANCEL, MOVE, CANCEL | {"arguments": {"order_id": "#W3", "reason": "no longer needed"}}, told),
        (f"I will do this: {CANCEL['name']}", MOVE, told),
    ]
    assert [reward(task, played, item, *said) for said in wrong] == [0.0] * len(wrong)


def test_every_part_of_the_reward_basis_and_no_other(folder: Path, played: Played) -> None:
    task = make(folder)

    def score(said: Sequence[Any], *basis: str, **criteria: Any) -> float:
        return reward(task, played, task.row_item(row(basis=basis, **criteria), "0"), *said)

    done, told = [LOOK, CANCEL, MOVE], "It is 1045.5"
    assert (score(done, "DB"), score([told], "COMMUNICATE"), score([], "DB")) == (1.0, 1.0, 0.0)
    assert (score(done, "DB", "NL_ASSERTION"), score([*done, told], "DB", "NL_ASSERTION")) == (0.0, 1.0)
    assert score(done, "DB", "NL_ASSERTION", communicate_info=[]) == 1.0
    assert (score(done, "ACTION"), score(done[:2], "ACTION")) == (1.0, 0.0)
    transfer = {"name": "transfer_to_human_agents", "arguments": {"summary": "a"}, "compare_args": []}
    other = {"name": "transfer_to_human_agents", "arguments": {"summary": "b"}}
    assert (score([other], "ACTION", actions=[transfer]), score([LOOK], "ACTION", actions=[transfer])) == (1.0, 0.0)
    assert (score([CANCEL], "DB", actions=[]), score([LOOK, other], "DB", actions=[])) == (0.0, 1.0)
    assert score([CANCEL], "DB", actions=None) == 1.0, "no reference, nothing to compare"


def test_a_conversation_with_a_customer(folder: Path, played: Played) -> None:
    seen: list[list[Turn]] = []

    def customer(turns: Sequence[Turn]) -> str:
        seen.append([dict(turn) for turn in turns])
        return ["I want to cancel.", "Yes, do.", "Thanks! ###STOP###"][len(seen) - 1]

    task = make(folder, Scripted(customer))
    item = task.row_item(row(), "0")
    game = played(task, item, say("Are you sure?", CANCEL, MOVE, "", "It is 1045.5.", CANCEL))
    assert game.ended == "task" and len(game.messages) == 5 and task.score([game]) == [1.0]
    assert game.prompt.endswith("You: Hi! How can I help you today?\nCustomer: I want to cancel.")
    assert "Be {kind}." in game.prompt and "- cancel_pending_order(order_id: text, reason: text)" in game.prompt
    assert "Cancel it." not in game.prompt and "1045.5" not in game.prompt, "the scenario and the outputs are not shown"
    assert game.feedback[0] == "Customer: Yes, do." and game.feedback[4] == "Customer: Thanks!"
    assert json.loads(str(game.feedback[1]).removeprefix("Tool: "))["status"] == "cancelled"
    assert "Nothing was said" in str(game.feedback[3])
    assert [turn["role"] for turn in seen[2]] == ["system", "user", "assistant", "user", "assistant", "user"]
    told = "Domain: retail\nReason for call: Cancel it.\nKnown info: You are Ada.\nTask instructions: Be kind."
    assert seen[0][0]["content"].endswith(told) and "###TRANSFER###" in seen[0][0]["content"]
    assert [turn["content"] for turn in seen[2][1:]] == [
        "Hi! How can I help you today?", "I want to cancel.", "Are you sure?", "Yes, do.", "It is 1045.5."
    ]  # fmt: skip


@pytest.mark.parametrize("reply", ["###STOP###", "bye ###TRANSFER###", "###OUT-OF-SCOPE### what?"])
def test_the_customer_ends_it_and_nobody_else(folder: Path, played: Played, reply: str) -> None:
    task = make(folder, Scripted(lambda turns: reply if len(turns) > 2 else "hello"))
    item = task.row_item(row(actions=[], communicate_info=[]), "0")
    assert reward(task, played, item, "Hello") == 1.0
    endless = make(folder, Scripted(lambda turns: "go on"))
    assert reward(endless, played, item, "Hello") == 0.0, "nobody ended it: no reward, as in tau2"
    assert reward(make(folder), played, item, "Hello") == 1.0, "recorded messages are all there is"


def test_too_many_errors_end_it_without_reward(folder: Path, played: Played) -> None:
    task = make(folder, max_errors=3)
    item = task.row_item(row(actions=[], communicate_info=[]), "0")
    bad = {"name": "no_such_tool", "arguments": {}}
    game = played(task, item, say(bad, "text", bad, bad, "more"))
    assert game.ended == "task" and len(game.messages) == 4 and task.score([game]) == [0.0]
    assert game.feedback[0] == "Tool: Error: Tool 'no_such_tool' not found."
    assert reward(task, played, item, bad, bad) == 1.0


def test_a_judge_for_assertions(folder: Path, played: Played) -> None:
    asked: list[str] = []

    def judge(verdict: str) -> Scripted:
        def say_(turns: Sequence[Turn]) -> str:
            if "You judge" not in turns[0]["content"]:
                return "###STOP###" if len(turns) > 2 else "hello"
            asked.append(turns[1]["content"])
            return verdict

        return Scripted(say_)

    for verdict, expected in (("1: yes\n2: yes", 1.0), ("1: yes\n2: no", 0.0), ("garbage", 0.0), ("1: yes", 0.0)):
        task = make(folder, judge(verdict), judge_assertions=True)
        item = task.row_item(row(basis=["DB", "NL_ASSERTION"]), "0")
        assert reward(task, played, item, CANCEL, MOVE, "done") == expected
    assert "agent: done\nCustomer: ..." in asked[0] and "1: Agent should say 1,045.5.\n2: Agent should be kind." in asked[0]
    recorded = make(folder, judge("1: yes\n2: yes"), judge_assertions=True)
    recorded.use_recorded()
    assert reward(recorded, played, item, CANCEL, MOVE) == 1.0, "judged, though nobody ended it: it was recorded so"
    assert asked[-1].startswith("The conversation:\nagent: {")
    count = len(asked)
    assert reward(task, played, item, "done") == 0.0 and len(asked) == count, "what is wrong already is not judged"


def test_a_judge_has_to_be_somebody(folder: Path) -> None:
    with pytest.raises(UserError, match="task.judge_assertions = true: nobody is there to judge"):
        make(folder, judge_assertions=True)


@pytest.mark.parametrize(("reply", "met"), [("1. Yes\n2) YES", True), ("**1**: yes\n**2**: yes", True), ("2: yes\n1: no", False)])
def test_reading_a_verdict(reply: str, met: bool) -> None:
    assert all_met(reply, 2) is met


def test_initial_states(folder: Path, played: Played) -> None:
    state = {
        "initialization_data": {"agent_data": {"orders": {"#W1": {"status": "delivered"}}}, "user_data": None},
        "initialization_actions": [{"env_type": "assistant", "func_name": MOVE["name"], "arguments": MOVE["arguments"]}],
        "message_history": None,
    }
    task = make(folder)
    item = task.row_item(row(actions=[LOOK], communicate_info=[]) | {"initial_state": state}, "0")
    game = played(task, item, say(LOOK))
    assert '"status": "delivered"' in str(game.feedback[0]) and task.score([game]) == [1.0]
    assert reward(task, played, item, CANCEL) == 1.0, "the order is not pending, so nothing happens"


def test_files_beside_the_tasks_and_the_official_split(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    section = task_settings("tau2_retail", [f"path={folder / 'tasks.json'}"])
    task = section.build(Path.cwd())
    ids = {split: [task.items(split)[i].id for i in range(task.items(split).size or 0)] for split in ("train", "test")}  # type: ignore[arg-type]
    assert ids == {"train": ["train-0 (0)", "train-1 (2)", "train-2 (4)"], "test": ["test-0 (1)", "test-1 (3)"]}
    with pytest.raises(UserError, match="tau2_retail is a conversation"):
        task.check_agents(["a"], 3)
    said = [{"role": "assistant", "content": None, "tool_calls": [{"function": {**CANCEL, "arguments": "{}"}}]}, CANCEL]
    rows = [
        {"id": "0", "messages": [*said, MOVE, {"role": "user", "content": "hm"}, "1045.5"]},
        {"id": "1", "messages": [{"role": "assistant", "content": "1045.5", "tool_calls": [CANCEL]}, MOVE]},
        {"id": "2", "response": "\n".join(say(CANCEL, MOVE, "It is 1,045.5"))},
        {"id": "3", "messages": []},
    ]
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    argv = ["score", "tau2_retail", "--items", str(folder / "tasks.json"), "--responses", str(tmp_path / "said.jsonl")]
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [r["score"] for r in report["items"]] == [1.0, 1.0, 1.0, 0.0] and report["n"] == 4
    assert main([*argv, "max_errors=1"]) == 0
    assert "mean = 0.5000" in capsys.readouterr().out
    assert main(["tasks", "sample", "tau2_retail", f"path={folder / 'tasks.json'}", "-n", "1"]) == 0
    assert "# retail policy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": {"retail_db.json": None}}, "task.database: there is no retail_db.json.gz or retail_db.json in"),
        ({"files": {"retail_db.json": "{"}}, "task.database = .*cannot be read as JSON"),
        ({"files": {"retail_db.json": '{"users": {}, "orders": []}'}}, "has no table 'orders'"),
        ({"files": {"retail_policy.md": None}}, "task.policy: there is no retail_policy.md or policy.md in"),
        ({"files": {"retail_split.json": "[]"}}, "task.split = .*: is no {train"),
        ({"row": {"evaluation_criteria": {"reward_basis": ["LUCK"]}}}, "item .*: not as in tau2: reward_basis.0 = 'LUCK'"),
        ({"row": {"evaluation_criteria": {"actions": [{"name": "x"}]}}}, "not as in tau2: actions.0.arguments: field required"),
        ({"row": {"evaluation_criteria": {"actions": 5}}}, "item .*: not as in tau2: actions = 5: should be a valid list"),
        ({"row": {"evaluation_criteria": {"env_assertions": [{}]}}}, "env_assertions"),
        ({"row": {"user_scenario": None}}, "user_scenario is null"),
        ({"row": {"initial_state": "new"}}, "item .*: not as in tau2: initial_state = 'new': should be"),
        ({"row": {"initial_state": {"initialization_data": {"agent_data": {"shops": {"a": {}}}}}}}, "initial_state is not as in"),
    ],
)
def test_mistakes_name_the_file_or_the_item(folder: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    rows = [row() | {"id": str(n)} | scenario(n) | change.get("row", {}) for n in range(6)]
    (tmp_path / "tasks.json").write_text(json.dumps(rows))
    for name, text in change.get("files", {}).items():
        (tmp_path / name).unlink() if text is None else (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        task = task_settings("tau2_retail", ["path=tasks.json"]).build(tmp_path)
        task.open(task.items("train")[0])
    assert "\n" not in str(caught.value)


DIVIDE = {"name": "calculate", "arguments": {"expression": "1/0"}}
TALK = st.text() | st.sampled_from(say(CANCEL, MOVE, LOOK, DIVIDE, "{" * 500))


@settings(max_examples=60)
@given(st.lists(TALK, max_size=4), st.text())
def test_no_text_crashes_it(folder: Path, played: Played, said: list[str], reply: str) -> None:
    """Neither the team's nor the customer's."""
    for responder in (Silent(), Scripted(lambda turns: reply)):
        task = make(folder, responder)
        assert reward(task, played, task.row_item(row(), "0"), *said) in (0.0, 1.0)


@pytest.mark.parametrize("text", ["{" * 10**6, '{"name":' * 10**5, json.dumps(CANCEL) * 10**4, "\ud800" * 10**6, "9" * 10**6])
def test_a_megabyte_is_read(folder: Path, played: Played, text: str) -> None:
    task = make(folder)
    assert reward(task, played, task.row_item(row(), "0"), text) == 0.0
    nested = '{"name": "get_order_details", "arguments": {"order_id": ' + "[" * 10**5 + "]" * 10**5 + "}}"
    assert reward(task, played, task.row_item(row(), "0"), nested) == 0.0


READS = ("get_", "find_", "search_", "list_", "calculate", "transfer_")


@pytest.mark.parametrize(("domain", "expected"), [("retail", 172), ("airline", 49)])
def test_reference_actions_score_one_and_other_writes_zero(
    bench: Any, bench_folder: Path, played: Played, domain: str, expected: int
) -> None:
    task = make(bench_folder / "tau2bench", domain=domain)
    writes = 0
    for given_row in bench(f"tau2bench/{domain}_tasks"):
        item, criteria = task.row_item(given_row, str(given_row["id"])), given_row["evaluation_criteria"]
        actions = [{"name": action["name"], "arguments": action["arguments"]} for action in criteria["actions"]]
        told = ["; ".join(criteria["communicate_info"])] if criteria["communicate_info"] else []
        assert reward(task, played, item, *actions, *told) == 1.0, item.id
        assert not criteria["communicate_info"] or reward(task, played, item, *actions, "It is done.") == 0.0, item.id
        actions = [action for action in actions if not action["name"].startswith(READS)]
        assert reward(task, played, item, *actions, *told) == 1.0, "reading leaves the database as it is"
        end = task._reference(item)
        for place, action in enumerate(actions):
            before, after = actions[:place], actions[place + 1 :]
            if task._reference(_with(item, before + after)) == end:
                continue  # refused in the reference itself, or an address that is already so
            writes += 1
            other = {**action, "arguments": altered(action["arguments"])}
            assert reward(task, played, item, *before, *after, *told) == 0.0, (item.id, action)
            assert reward(task, played, item, *before, other, *after, *told) == 0.0, (item.id, other)
    assert writes == expected


def test_messages_of_nothing_are_not_right_even_where_nothing_was_to_be_done(folder: Path, played: Played) -> None:
    """No message at all is the replay of a reference without actions."""
    task = make(folder)
    item = task.row_item(row([], communicate_info=[]), "1")
    assert [reward(task, played, item, *said) for said in ([], [""], ["  "], ["I cannot do that."])] == [1.0, 0.0, 0.0, 1.0]


def _with(item: Item, actions: list[dict[str, Any]]) -> Item:
    return Item(item.id, item.prompt, {**item.data, "actions": actions})


def altered(arguments: dict[str, Any]) -> dict[str, Any]:
    """The first argument changed a little: an id that is another's, or nobody's."""
    key = next(iter(arguments))
    return {**arguments, key: arguments[key][:-1] + ("1" if arguments[key][-1] != "1" else "2")}
