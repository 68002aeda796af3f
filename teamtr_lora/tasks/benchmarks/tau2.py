"""tau2_retail, tau2_airline: serve a customer with tools over a database; rewarded by what is in it at the end.

A message either calls a tool (the canonical form is {"name": ..., "arguments": {...}}) or speaks to the customer, whom the
responder plays. The reward is tau2's: every part of the task's reward_basis must be right. DB: the database is as after the
reference actions; COMMUNICATE: the required outputs are in what the agent said; ACTION: every reference action was done.
NL_ASSERTION (retail) needs a judge: with `judge_assertions` the responder is one; without, the required outputs that those
assertions restate are looked for instead. A conversation that nobody ended, in which the agent said nothing, or with too many
tool errors, scores 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import DataFile, OnThisMachine, Text
from teamtr_lora.tasks.benchmarks.tau2_files import KITS, DomainFiles
from teamtr_lora.tasks.benchmarks.tau2_tools import Database, Toolkit
from teamtr_lora.tasks.machinery.bench import field
from teamtr_lora.tasks.machinery.forms import Form, check_form
from teamtr_lora.tasks.machinery.responder import ConversationSettings, ConversationTask, Responder, Turn, build_responder, tidy
from teamtr_lora.tasks.machinery.task import Feedback, Interaction, Item, item_of, settled
from teamtr_lora.tasks.machinery.task_settings import data_file
from teamtr_lora.team import Episode, Message
from teamtr_lora.team.protocol import without_reasoning
from teamtr_lora.team.tool_calls import ToolCall, read_calls

STOPS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
GREETING = "Hi! How can I help you today?"
LONGEST_SAID = 4000  # characters of a message that the customer is given

AGENT = """You are a customer service agent. Help the customer according to the policy.

{policy}

# Tools
{tools}

To call a tool, write only the call, in this form: {{"name": "get_user_details", "arguments": {{"user_id": "..."}}}}
Anything else you write is said to the customer."""
CUSTOMER = """You play a customer who talks to a customer service agent. Follow the scenario below strictly.
- Write one message at a time, as a person would; say things in your own words.
- Never make up what the scenario does not say: what is not in it you do not know.
- Tell things when the agent asks for them, not all at once.
- Go on until everything in the scenario is done, which is later than when the agent says that it will be; then write {stop}.
- If you are transferred to somebody else, write {transfer}. If the scenario does not say enough to go on, write {out}.

Scenario:
{scenario}"""
JUDGE = """You judge a conversation between a customer service agent and a customer. For each expectation, say whether the agent
met it: one line for each, its number and yes or no, such as "1: yes", and nothing else."""


class Tau2Action(Form):
    name: str
    arguments: dict[str, Any]
    compare_args: list[str] | None = None
    requestor: str = "assistant"


class Tau2Data(Form):
    scenario: str
    actions: list[Tau2Action] | None
    communicate_info: list[str]
    nl_assertions: list[str]
    reward_basis: list[Literal["DB", "COMMUNICATE", "ACTION", "ENV_ASSERTION", "NL_ASSERTION"]]
    initial_state: dict[str, Any]


class Tau2Task(ConversationTask):
    data_form = Tau2Data

    def __init__(
        self, name: str, files: DomainFiles, responder: Responder, max_errors: int = 10, judge_assertions: bool = False
    ) -> None:
        super().__init__(responder)
        self.name, self.files, self.max_errors = name, files, max_errors
        if judge_assertions and not responder.live:
            raise UserError("task.judge_assertions = true: nobody is there to judge; set task.responder.url")
        self._judge = responder if judge_assertions else None
        self.kit = KITS[files.domain]
        self._tools = self.kit.describe()

    def row_item(self, row: Mapping[str, Any], name: str) -> Item:
        user, criteria = (field(row, name, [key], dict) for key in ("user_scenario", "evaluation_criteria"))
        start = row.get("initial_state") or {}
        data = {
            "scenario": scenario_text(user),
            "actions": criteria.get("actions"),
            "communicate_info": criteria.get("communicate_info") or [],
            "nl_assertions": criteria.get("nl_assertions") or [],
            "reward_basis": criteria.get("reward_basis") or ["DB", "COMMUNICATE"],
            "initial_state": start,
        }
        check_form(Tau2Data, data, f"item {name}: not as in tau2")
        if start.get("message_history") or criteria.get("env_assertions"):
            raise UserError(
                f"item {name}: has message_history or env_assertions, which only tau2's telecom domain uses; leave it out"
            )
        item = Item(name, AGENT.format(policy=self.files.policy_text, tools=self._tools), data)
        if start:
            self.start(item)  # raises where it is not as in tau2
        return item

    def check_item(self, item: Item) -> None:
        super().check_item(item)
        self.start(item)

    def text(self, item: Item) -> str:
        return str(item.data["scenario"])

    def split_rows(self, rows: Any) -> tuple[list[Any], list[Any]] | None:
        ids = self.files.split_ids()
        if ids is None:
            return None
        by_id = {str(row.get("id")): row for row in rows}
        train, test = ([by_id[name] for name in ids[side] if name in by_id] for side in ("train", "test"))
        return (train, test) if train and test else None

    def open(self, item: Item) -> Service:
        return Service(item, self)

    def start(self, item: Item) -> Toolkit:
        """Fresh tools on the database as the task begins."""
        kit = self.kit(Database(self.files.tables))
        state = item.data.get("initial_state") or {}
        try:
            for table, records in ((state.get("initialization_data") or {}).get("agent_data") or {}).items():
                for key, record in records.items():
                    kit.db.add(table, key, {**(kit.db.find(table, key) or {}), **record})
            for action in state.get("initialization_actions") or []:
                kit.call(action["func_name"], action.get("arguments") or {})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"item {item.id}: initial_state is not as in tau2 ({error!r})") from error
        return kit

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        items = {episode.item_id: item_of(episode) for episode in episodes}  # one for the episodes of a group
        expected = {name: self._reference(item) for name, item in items.items()}
        rewards = [self._reward(episode, expected[episode.item_id]) for episode in episodes]
        verdicts = {place: self._judged(e) for place, e in enumerate(episodes) if rewards[place] and self._needs_judge(e)}
        return [reward * settled(verdicts[place]) if place in verdicts else reward for place, reward in enumerate(rewards)]

    def _reward(self, episode: Episode, expected: Mapping[tuple[str, str], Any]) -> float:
        if self.responder.live and episode.ended != "task":
            return 0.0
        data, kit, made, said, errors = item_of(episode).data, self.start(item_of(episode)), [], [], 0
        for message in episode.messages:
            calls, words = heard(message.text, self.kit)
            made += calls
            said.append(words.lower().replace(",", ""))
            errors += sum(kit.call(call.name, call.arguments)[1] for call in calls)
        if errors >= self.max_errors or (said and not (made or any(said))):
            return 0.0  # messages of nothing; without any at all, what was to be done decides
        basis = set(data["reward_basis"])
        informed = all(any(info.lower() in words for words in said) for info in data["communicate_info"])
        right = {
            "DB": lambda: data["actions"] is None or kit.db.changes() == expected,
            "COMMUNICATE": lambda: informed,
            "NL_ASSERTION": lambda: informed or self._judge is not None,
            "ACTION": lambda: all(any(_same(action, call) for call in made) for action in data["actions"] or ()),
        }
        return float(all(check() for part, check in right.items() if part in basis))

    def _reference(self, item: Item) -> dict[tuple[str, str], Any]:
        kit = self.start(item)
        for action in item.data["actions"] or ():
            if action.get("requestor", "assistant") == "assistant":  # customers have no tools in these domains
                kit.call(action["name"], action["arguments"])
        return kit.db.changes()

    def _needs_judge(self, episode: Episode) -> bool:
        data = item_of(episode).data
        return self._judge is not None and "NL_ASSERTION" in data["reward_basis"] and bool(data["nl_assertions"])

    def _judged(self, episode: Episode) -> float | Future[float]:
        wanted = item_of(episode).data["nl_assertions"]
        lines = []
        for message, answer in zip(episode.messages, episode.feedback, strict=False):
            lines += [f"agent: {tidy(message.text, LONGEST_SAID)}", *([answer[:LONGEST_SAID]] if answer else [])]
        numbered = "\n".join(f"{number}: {text}" for number, text in enumerate(wanted, 1))
        asked = f"The conversation:\n{chr(10).join(lines)}\n\nThe expectations:\n{numbered}"
        turns = [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}]
        assert self._judge is not None
        return self._judge.ask(turns, lambda reply: float(all_met(reply, len(wanted))))


class Service(Interaction):
    """Tools answer at once; the customer is asked."""

    def __init__(self, item: Item, task: Tau2Task) -> None:
        super().__init__(item)
        self._task, self._kit, self._errors = task, task.start(item), 0
        stop, transfer, out = STOPS
        system = CUSTOMER.format(scenario=item.data["scenario"], stop=stop, transfer=transfer, out=out)
        self._turns: list[Turn] = [{"role": "system", "content": system}, {"role": "user", "content": GREETING}]

    def first(self) -> str | Future[str]:
        def opened(reply: str) -> str:
            self._turns.append({"role": "assistant", "content": reply or "Hello."})
            return f"{self.item.prompt}\n\nYou: {GREETING}" + (f"\nCustomer: {reply}" if reply else "")

        return self._task.responder.ask(self._turns, opened)

    def feed(self, message: Message) -> Feedback | Future[Feedback]:
        calls, words = heard(message.text, self._task.kit)
        if calls:
            results = [self._kit.call(call.name, call.arguments) for call in calls]
            self._errors += sum(failed for _, failed in results)
            return Feedback("\n".join(f"Tool: {text}" for text, _ in results), done=self._errors >= self._task.max_errors)
        said = tidy(words, LONGEST_SAID)
        if not said:
            return Feedback("Nothing was said. Call a tool, or speak to the customer.")
        self._turns.append({"role": "user", "content": said})
        return self._task.responder.ask(self._turns, self._answered)

    def _answered(self, reply: str) -> Feedback:
        self._turns.append({"role": "assistant", "content": reply or "..."})
        done = any(stop in reply for stop in STOPS)
        for stop in STOPS:
            reply = reply.replace(stop, "")
        return Feedback(f"Customer: {reply.strip() or '...'}", done=done)


def heard(text: str, kit: type[Toolkit]) -> tuple[list[ToolCall], str]:
    """The tool calls of a message, and what it says beside them."""
    return read_calls(without_reasoning(text), kit.checks)


def all_met(reply: str, count: int) -> bool:
    said = {int(number): word.lower() for number, word in re.findall(r"(?m)^\W*(\d{1,3})\W+(yes|no)\b", reply, re.IGNORECASE)}
    return all(said.get(number) == "yes" for number in range(1, count + 1))


def scenario_text(user: Mapping[str, Any]) -> str:
    told = user.get("instructions")
    parts = [f"Persona: {user['persona']}"] if user.get("persona") else []
    if isinstance(told, Mapping):
        titles = ("domain", "reason_for_call", "known_info", "unknown_info", "task_instructions")
        parts += [f"{title.replace('_', ' ').capitalize()}: {told[title]}" for title in titles if told.get(title)]
    elif told:
        parts.append(str(told))
    return "\n".join(parts)


def _same(action: Mapping[str, Any], call: ToolCall) -> bool:
    """tau2's: compared are all arguments of the call, or those that the action names."""
    keys = set(call.arguments if action.get("compare_args") is None else action["compare_args"])
    sides = [{key: value for key, value in side.items() if key in keys} for side in (action["arguments"], call.arguments)]
    return bool(action["name"] == call.name and sides[0] == sides[1])


class Tau2Settings(ConversationSettings):
    """Serve a customer, whom the responder plays, with tools over a database; tau2-bench's tasks and rewards."""

    paper_samples: ClassVar[Mapping[str, int]] = {"tau2_retail": 4, "tau2_airline": 4}  # its pass@1 and pass@4 (sec:experiments)
    about: ClassVar[Mapping[str, str]] = {
        "tau2_retail": "tau2-bench, retail: serve a shop's customer, whom the responder plays, with tools over orders and users.",
        "tau2_airline": "tau2-bench, airline: serve a traveller, whom the responder plays, with tools over flights and bookings.",
    }

    name: Literal["tau2_retail", "tau2_airline"] = Field(
        description="path is the domain's tasks file; database, policy and split are looked for beside it."
    )
    database: Annotated[DataFile | None, OnThisMachine("file")] = Field(
        default=None, description="The domain's database (.json or .json.gz), relative to the recipe; null looks beside path."
    )
    policy: Annotated[Text | None, OnThisMachine("file")] = Field(
        default=None, description="The domain's policy.md, relative to the recipe; null looks beside path."
    )
    split: Annotated[DataFile | None, OnThisMachine("file")] = Field(
        default=None,
        description="Official {train: [ids], test: [ids]}, relative to the recipe; null looks beside path, and holds out "
        "test_fraction where there is none.",
    )
    max_errors: int = Field(default=10, ge=1, description="Tool calls that may fail in a conversation before it ends with 0.")
    judge_assertions: bool = Field(
        default=False,
        description="Let the responder judge natural-language assertions where they are in a task's reward basis (retail); false "
        "looks for the required outputs in what the agent said instead.",
    )

    def make(self, folder: Path) -> Tau2Task:
        given = (self.database, self.policy, self.split)
        database, policy, split = (data_file(folder, path) if path else None for path in given)
        files = DomainFiles(
            domain=self.name.removeprefix("tau2_"),
            beside=data_file(folder, self.path).parent if self.path else folder,
            database=database,
            policy=policy,
            split=split,
        )
        responder = build_responder(self.responder, folder)
        return Tau2Task(self.name, files, responder, max_errors=self.max_errors, judge_assertions=self.judge_assertions)
