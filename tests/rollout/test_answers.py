"""Environments whose answers take time: other episodes go on meanwhile, and nothing else changes."""

import logging
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from teamtr_lora.common.errors import UserError
from teamtr_lora.rollout import patience
from teamtr_lora.rollout.collector import PlayPlan, play
from teamtr_lora.rollout.sampler import Completion, Request
from teamtr_lora.tasks import Feedback, Interaction, Item, Task
from teamtr_lora.team import Episode, Message, Team

ITEMS = [Item(f"i{n}", f"prompt {n}", {"number": n}) for n in range(6)]
VERSIONS = {"a": "v0000-a", "b": "v0000-b"}


class Echo:
    """A sampler that finishes everything that is queued at a poll."""

    def __init__(self, team: Team) -> None:
        self.team, self.queue, self.polls = team, {}, []  # type: ignore[var-annotated]
        self.tickets = 0

    def submit(self, request: Request) -> int:
        self.tickets += 1
        self.queue[self.tickets] = request
        return self.tickets

    def poll(self) -> list[Completion]:
        self.polls.append(len(self.queue))
        ids = self.team.protocol.chat.encode("hi") + self.team.protocol.end_ids[:1]
        done = [Completion(t, ids, [-1.0] * len(ids), VERSIONS[r.agent], "stop") for t, r in self.queue.items()]
        self.queue.clear()
        return done


class Slow(Interaction):
    """Asks `ask(number, turn)`, at once or later."""

    def __init__(self, item: Item, ask: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__(item)
        self._ask, self.turn = ask, 0

    def first(self) -> str | Future[str]:
        return self._ask(lambda: f"{self.item.prompt} opened")  # type: ignore[no-any-return]

    def feed(self, message: Message) -> Feedback | Future[Feedback]:
        self.turn += 1
        turn, number = self.turn, self.item.data["number"]
        return self._ask(lambda: Feedback(f"{number} heard {turn}", 0.1, done=turn == 3 and number % 2 == 0))  # type: ignore[no-any-return]


class Talk(Task):
    def __init__(self, ask: Callable[[Callable[[], Any]], Any]) -> None:
        self.ask = ask

    def open(self, item: Item) -> Interaction:
        return Slow(item, self.ask)


def later(seconds: float) -> Callable[[Callable[[], Any]], Future[Any]]:
    def ask(make: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        threading.Timer(seconds, lambda: future.set_result(make())).start()
        return future

    return ask


def plan(items: Sequence[Item] = ITEMS) -> PlayPlan:
    return PlayPlan(items, 2, temperature=1.0, max_message_tokens=8, purpose="test")


def record(episodes: list[Episode]) -> list[Any]:
    return [(e.item_id, e.prompt, e.feedback, e.rewards, e.ended, [m.prompt_ids for m in e.messages]) for e in episodes]


def test_answers_that_come_later_make_the_same_episodes(make_team: Callable[..., Team]) -> None:
    team = make_team(["a", "b"], router={"rounds": 3})
    at_once = play(team, Talk(lambda make: make()), Echo(team), plan(), VERSIONS)  # type: ignore[arg-type]
    assert [e.ended for e in at_once] == ["task", "task", "router", "router"] * 3
    assert at_once[0].prompt == "prompt 0 opened" and at_once[0].feedback == [f"0 heard {turn}" for turn in (1, 2, 3)]
    for seconds in (0.0, 0.01):
        assert record(play(team, Talk(later(seconds)), Echo(team), plan(), VERSIONS)) == record(at_once)  # type: ignore[arg-type]


def test_episodes_wait_side_by_side(make_team: Callable[..., Team]) -> None:
    """Nobody is answered before all have asked: 12 openings, three times 12 messages, and 6 of those who go on."""
    team = make_team(["a", "b"], router={"rounds": 2})
    batches = [12, 12, 12, 12, 6]
    asked: list[tuple[Future[Any], Callable[[], Any]]] = []

    def answer() -> None:
        for future, make in asked:
            future.set_result(make())
        asked.clear()

    def ask(make: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        asked.append((future, make))
        if len(asked) == batches[0]:
            batches.pop(0)
            answer()
        return future

    def give_up() -> None:  # one that waits alone would wait for good
        batches[:0] = [1] * 99
        answer()

    stuck = threading.Timer(20, give_up)
    stuck.start()
    play(team, Talk(ask), Echo(team), plan(), VERSIONS)  # type: ignore[arg-type]
    stuck.cancel()
    assert not batches


def test_who_is_answered_speaks_while_the_others_still_wait(make_team: Callable[..., Team]) -> None:
    """One environment answers only after the others have come to their end."""
    team = make_team(["a", "b"], router={"rounds": 2})
    last: list[tuple[Future[Any], Callable[[], Any]]] = []
    answered: list[str] = []

    class Held(Slow):
        def first(self) -> str:
            return self.item.prompt

        def feed(self, message: Message) -> Feedback | Future[Feedback]:
            if self.item.id != "i0":
                answered.append(self.item.id)
                if len(answered) == 5 * 4:
                    last[0][0].set_result(last[0][1]())
                return Feedback("ok")
            future: Future[Feedback] = Future()
            if last:
                return Feedback("ok")
            last.append((future, lambda: Feedback("at last")))
            return future

    class Holding(Task):
        def open(self, item: Item) -> Interaction:
            return Held(item, lambda make: make())

    one_each = PlayPlan(ITEMS, 1, temperature=1.0, max_message_tokens=8, purpose="test")
    episodes = play(team, Holding(), Echo(team), one_each, VERSIONS)  # type: ignore[arg-type]
    assert episodes[0].feedback == ["at last", "ok", "ok", "ok"] and all(len(e.messages) == 4 for e in episodes)


@pytest.mark.parametrize(("opening", "failing"), [(True, 0), (False, 3)], ids=["opening", "answer"])
def test_what_fails_stops_the_play_and_forgets_the_rest(make_team: Callable[..., Team], opening: bool, failing: int) -> None:
    team = make_team(["a", "b"])
    waiting: list[Future[Any]] = []

    def ask(make: Callable[[], Any]) -> Any:
        if not opening and isinstance(made := make(), str):
            return made
        waiting.append(Future())
        if len(waiting) == 12:
            waiting[failing].set_exception(UserError("task.responder.url = 'x': gone"))
        return waiting[-1]

    with pytest.raises(UserError, match="gone"):
        play(team, Talk(ask), Echo(team), plan(), VERSIONS)  # type: ignore[arg-type]
    assert [future.cancelled() for future in waiting] == [n != failing for n in range(12)]


@pytest.mark.parametrize("at_once", [True, False])
def test_an_environment_that_does_not_answer_is_named_with_its_item(
    make_team: Callable[..., Team], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at_once: bool
) -> None:
    """While it is waited for, whether it blocks or answers later; nothing is broken off."""
    named = threading.Event()
    monkeypatch.setattr(patience.logger, "warning", lambda *words: (logging.warning(*words), named.set()))

    class Stuck(Interaction):
        def feed(self, message: Message) -> Feedback | Future[Feedback]:
            return answer() if at_once else later_on.submit(answer)

    class Quiz(Task):
        def open(self, item: Item) -> Interaction:
            return Stuck(item)

    def answer() -> Feedback:
        return Feedback("go on" if named.wait(20) else "nobody was named", done=True)

    monkeypatch.setattr(patience, "_due", 0.01)
    team = make_team(["a"])
    with ThreadPoolExecutor() as later_on:
        episodes = play(team, Quiz(), Echo(team), plan(ITEMS[:1]), VERSIONS)  # type: ignore[arg-type]
    assert [episode.feedback for episode in episodes] == [["go on"]] * 2
    assert re.search(r"item 'i0': Stuck has not answered for \d+ s; still waiting", caplog.text)
    assert patience._due > 0.01 and not patience._calls, "it speaks ever more rarely"
