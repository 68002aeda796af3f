"""Episodes advance one by one, from the right versions, within the context, with rewards where they were earned."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.common.errors import UserError
from teamtr_lora.evaluation.outcome import Attempt, judge
from teamtr_lora.recipe import RolloutSection
from teamtr_lora.rollout.collector import PlayPlan, play
from teamtr_lora.rollout.sampler import Completion, Request, derive_seed
from teamtr_lora.rollout.transformers_engine import TransformersSampler
from teamtr_lora.runs.rollout_store import RolloutStore
from teamtr_lora.runs.transcripts import episode_record
from teamtr_lora.tasks import Feedback, Interaction, Item, Task
from teamtr_lora.team import Episode, Message, Team

ITEMS = [Item(f"i{n}", f"prompt {n}") for n in range(3)]
VERSIONS = {"a": "v0000-a", "b": "v0000-b", "c": "v0000-c"}

MakeTeam = Callable[..., Team]


class FakeSampler:
    """Finishes one ticket a poll, the one `pick` chooses; says `say(request)`; records the order of everything."""

    def __init__(
        self, team: Team, pick: Callable[[list[int]], int] = min, say: Callable[[Request], str] = lambda r: "hi"
    ) -> None:
        self.team, self.pick, self.say = team, pick, say
        self.queue: dict[int, Request] = {}
        self.submitted: list[Request] = []
        self.versions = dict(VERSIONS)
        self.queue_sizes: list[int] = []

    def publish(self, version: AdapterVersion) -> None:
        self.versions[version.agent] = version.name

    def submit(self, request: Request) -> int:
        self.submitted.append(request)
        self.queue[len(self.submitted)] = request
        return len(self.submitted)

    def poll(self) -> list[Completion]:
        self.queue_sizes.append(len(self.queue))
        ticket = self.pick(list(self.queue))
        request = self.queue.pop(ticket)
        ids = self.team.protocol.chat.encode(self.say(request))[: request.params.max_tokens - 1]
        ids = ids + list(request.params.stop_ids[:1])
        return [Completion(ticket, ids, [-1.0] * len(ids), self.versions[request.agent], "stop")]

    def close(self) -> None:
        self.queue.clear()


class Counting(Task):
    """Scores an episode by how many messages it has."""

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        return [float(len(e.messages)) for e in episodes]


def plan(items: Sequence[Item] = ITEMS, episodes: int = 2, **options: Any) -> PlayPlan:
    values: dict[str, Any] = {"temperature": 1.0, "max_message_tokens": 8, "purpose": "test", **options}
    return PlayPlan(items, episodes, **values)


def test_every_item_is_played_in_the_order_of_the_plan(make_team: MakeTeam) -> None:
    team = make_team(["a", "b"], router={"rounds": 2})
    for pick in (min, max, lambda tickets: tickets[len(tickets) // 2]):
        episodes = play(team, Counting(), FakeSampler(team, pick), plan(), VERSIONS)
        assert [(e.item_id, e.group) for e in episodes] == [(f"i{n}", n) for n in range(3) for _ in range(2)]
        for episode in episodes:
            assert [m.agent for m in episode.messages] == ["a", "b", "a", "b"]
            assert [m.turn for m in episode.messages] == [0, 1, 2, 3]
            assert [m.version for m in episode.messages] == ["v0000-a", "v0000-b", "v0000-a", "v0000-b"]
            assert [m.text for m in episode.messages] == ["hi"] * 4
            assert episode.ended == "router" and episode.item == ITEMS[episode.group]
            assert episode.rewards == [0.0, 0.0, 0.0, 4.0] and episode.success


def test_there_is_no_barrier_between_turns(make_team: MakeTeam) -> None:
    """The newest ticket first: one episode runs to its end while the others still wait for their first message."""
    team = make_team(["a", "b"])
    sampler = FakeSampler(team, max)
    play(team, Task(), sampler, plan(), VERSIONS)
    assert sampler.queue_sizes == [6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1], "each finished message is at once followed by the next"
    assert [r.agent for r in sampler.submitted] == ["a"] * 6 + ["b"] * 6


def test_messages_hold_what_was_sampled(make_team: MakeTeam) -> None:
    team = make_team(["a", "b"])
    sampler = FakeSampler(team, say=lambda r: f"I am {r.agent}"[:6])
    episode = play(team, Task(), sampler, plan(ITEMS[:1], 1), VERSIONS)[0]
    for message, request in zip(episode.messages, sampler.submitted, strict=True):
        assert message.prompt_ids == request.prompt_ids
        assert message.token_ids[-1] == team.protocol.end_ids[0]
        assert message.sampler_logprobs == [-1.0] * len(message.token_ids)
        assert message.text == f"I am {message.agent}" and message.finish == "stop"
    assert "I am a" in team.protocol.chat.decode(episode.messages[1].prompt_ids)
    assert sampler.submitted[0].params.stop_ids == tuple(team.protocol.end_ids)


def test_a_superseded_version_is_refused(make_team: MakeTeam) -> None:
    team = make_team(["a", "b"])
    sampler = FakeSampler(team)
    sampler.versions["b"] = "v0000-old"
    with pytest.raises(RuntimeError, match="b: a message came from superseded version v0000-old, not v0000-b"):
        play(team, Task(), sampler, plan(), VERSIONS)


def test_a_failed_request_names_item_and_agent(make_team: MakeTeam) -> None:
    team = make_team(["a", "b"])
    sampler = FakeSampler(team)
    sampler.poll = lambda: [Completion(ticket=2, error="out of luck")]  # type: ignore[method-assign]
    with pytest.raises(UserError, match="item 'i1', agent 'a': out of luck"):
        play(team, Task(), sampler, plan(ITEMS, 1), VERSIONS)


def test_seeds_belong_to_the_episode_and_the_turn(make_team: MakeTeam) -> None:
    team = make_team(["a", "b"])

    def seeds(pick: Any = min, **options: Any) -> dict[tuple[int, int, int], int]:
        sampler = FakeSampler(team, pick)
        made = play(team, Task(), sampler, plan(**options), VERSIONS)
        of = {tuple(r.prompt_ids): [q.seed for q in sampler.submitted if q.prompt_ids == r.prompt_ids] for r in sampler.submitted}
        out = {}
        for place, episode in enumerate(made):
            index = sum(e.group == episode.group for e in made[:place])
            for message in episode.messages:
                seed = derive_seed(episode.seed, message.turn)
                assert seed in of[tuple(message.prompt_ids)], "the sampler was given the seed of this episode and turn"
                out[episode.group, index, message.turn] = seed
        return out

    all_of_them = seeds(episodes=4)
    assert len(set(all_of_them.values())) == 3 * 4 * 2, "groups, samples and turns all differ"
    for other in (seeds(max, episodes=4), seeds(episodes=2), seeds(items=ITEMS[:1], episodes=4)):
        assert other.items() <= all_of_them.items(), "whom else is played, and when, changes nothing"
    assert not set(seeds(purpose="other").values()) & set(all_of_them.values())


def test_real_episodes_do_not_depend_on_the_company(make_team: MakeTeam, make_sampler: Any, bank: Any) -> None:
    team, versions = make_team(["a", "b"]), {agent: bank.version(agent).name for agent in "abc"}
    many = play(team, Task(), make_sampler(context_tokens=512), plan(episodes=4), versions)
    few = play(team, Task(), make_sampler(context_tokens=512, requests_per_batch=2), plan(ITEMS[:1], 2), versions)
    assert [[m.token_ids for m in e.messages] for e in few] == [[m.token_ids for m in e.messages] for e in many[:2]]
    assert len({tuple(m.token_ids) for e in many for m in e.messages}) > 12


class Listening(Interaction):
    """It could answer, so nobody is asked before it has."""

    def feed(self, message: Message) -> Feedback:
        return Feedback()


class Listened(Task):
    def open(self, item: Item) -> Interaction:
        return Listening(item)


class ListenedHere(Task):
    """The same, by a function of the instance."""

    def open(self, item: Item) -> Interaction:
        found = Interaction(item)
        found.feed = lambda message: Feedback()  # type: ignore[method-assign]
        return found


@pytest.mark.parametrize("router", [{"kind": "debate", "rounds": 2}, {"kind": "debate", "judge": "c"}, {"kind": "blind"}])
def test_a_blind_round_is_asked_for_at_once_and_played_as_one_by_one(
    make_team: MakeTeam, make_sampler: Any, bank: Any, router: dict[str, Any]
) -> None:
    team, versions = make_team(["a", "b", "c"], view="per_agent", router=router), {a: bank.version(a).name for a in "abc"}
    blind = len(team.router.blind_round)
    for task, begun in ((Task(), 6 * blind), (Listened(), 6), (ListenedHere(), 6)):
        fake = FakeSampler(team, pick=max)  # the last turns come first
        episodes = play(team, task, fake, plan(), VERSIONS)
        assert fake.queue_sizes[0] == begun
        assert [[(m.turn, m.agent) for m in e.messages] for e in episodes] == [
            list(enumerate(team.router.next(e.messages[:t]) for t in range(len(e.messages)))) for e in episodes
        ]
        assert {len(e.messages) for e in episodes} == {team.router.max_messages} and all(
            len(e.rewards) == len(e.messages) for e in episodes
        )
    at_once, in_turn = (play(team, task, make_sampler(context_tokens=512), plan(), versions) for task in (Task(), Listened()))
    tokens = [[[(m.agent, m.prompt_ids, m.token_ids) for m in e.messages] for e in episodes] for episodes in (at_once, in_turn)]
    assert tokens[0] == tokens[1]


def test_a_blind_round_that_does_not_fit_ends_where_it_would_one_by_one(make_team: MakeTeam) -> None:
    """The third agent's name makes its prompt too long."""
    names = ["a", "b", "c" * 30]
    wide = make_team(names, view="per_agent", router={"kind": "debate"}, context_tokens=512)
    prompts = [len(wide.protocol.begin("prompt 0").prompt_for(name)) for name in names]
    assert prompts[2] > prompts[0] + 10
    team = make_team(names, view="per_agent", router={"kind": "debate"}, context_tokens=prompts[0] + 8)
    sampler = FakeSampler(team)
    sampler.versions[names[2]] = "v0000-c"
    for task in (Counting(), Listened()):
        for episode in play(team, task, sampler, plan(), dict(sampler.versions)):
            assert episode.ended == "overflow" and [m.agent for m in episode.messages] == ["a", "b"]


def test_a_prompt_longer_than_the_context_names_the_item(make_team: MakeTeam) -> None:
    team = make_team(["a", "b"], context_tokens=64)
    items = [Item("short", "x"), Item("long-one", "x" * 100)]
    for policy in ("end_episode", "error"):
        team = make_team(["a", "b"], context_tokens=64, on_overflow=policy)
        with pytest.raises(UserError, match=r"item 'long-one': its prompt is \d+ tokens, longer than the context of 64"):
            play(team, Task(), FakeSampler(team), plan(items), VERSIONS)


def test_the_process_generators_are_as_before_when_all_is_played(make_team: MakeTeam) -> None:
    """Whatever the task draws, and also where it fails."""

    class Draws(Task):
        def score(self, episodes: Sequence[Episode]) -> list[float]:
            drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
            if len(drawn) == 2:
                raise UserError("no score")
            return [0.0] * len(episodes)

    def states() -> tuple[Any, ...]:
        array: Any = np.random.get_state()
        return random.getstate(), array[1].tolist(), array[2:], torch.get_rng_state().tolist()

    drawn: list[tuple[float, ...]] = []
    team, before = make_team(["a", "b"]), states()
    play(team, Draws(), FakeSampler(team), plan(ITEMS), VERSIONS)
    assert states() == before
    with pytest.raises(UserError, match="no score"):
        play(team, Draws(), FakeSampler(team), plan(ITEMS), VERSIONS)
    assert states() == before and drawn[0] == drawn[1]


def checked(team: Team, items: list[Item]) -> None:
    class Rows(Task):
        def items(self, split: str) -> list[Item]:
            return items

    Rows().check_team(team, seed=0, per_stage=1, stages=len(items), held_out=1)


def test_prompts_that_are_too_long_are_found_before_anything_is_played(make_team: MakeTeam) -> None:
    """All of them, and none that has room for one token of an answer; the same limit as when it is played."""
    team = make_team(["a", "b"], context_tokens=64)
    items = [Item(f"of-{size}", "x" * size) for size in range(100)]
    with pytest.raises(UserError, match=r"do not fit into 64 tokens of context") as refused:
        checked(team, items)
    fits = []
    for item in items:
        with contextlib.suppress(UserError):
            play(team, Task(), FakeSampler(team), plan([item]), VERSIONS)
            fits.append(item)
    checked(team, fits)
    assert 0 < len(fits) < len(items) and str(refused.value).startswith(f"{len(items) - len(fits)} of the items")


def test_overflow_ends_the_episode_or_the_run(make_team: MakeTeam) -> None:
    def long_talk(policy: str) -> list[Episode]:
        team = make_team(["a", "b"], context_tokens=150, on_overflow=policy, router={"rounds": 5})
        return play(team, Counting(), FakeSampler(team, say=lambda r: "y" * 20), plan(max_message_tokens=20), VERSIONS)

    for episode in long_talk("end_episode"):
        assert episode.ended == "overflow" and 1 < len(episode.messages) < 10
        assert all(len(m.prompt_ids) + len(m.token_ids) <= 150 for m in episode.messages)
        assert episode.reward == len(episode.messages), "what was said is scored"
    with pytest.raises(UserError, match=r"item 'i0': its transcript is \d+ tokens, longer than the context of 150"):
        long_talk("error")


def test_the_last_message_gets_the_room_that_is_left(make_team: MakeTeam) -> None:
    team = make_team(["a"])
    prompt = len(team.protocol.begin("prompt 0").prompt_for("a"))
    sampler = FakeSampler(make_team(["a"], context_tokens=prompt + 3))
    episode = play(sampler.team, Task(), sampler, plan(ITEMS[:1], 1), VERSIONS)[0]
    assert sampler.submitted[0].params.max_tokens == 3 and len(episode.messages[0].token_ids) <= 3


def test_a_run_that_failed_leaves_the_sampler_usable(make_team: MakeTeam, make_sampler: Any, bank: Any) -> None:
    """A script may catch the error and play on: tickets of the failed play must not come back to it."""
    sampler: TransformersSampler = make_sampler(requests_per_batch=1)
    versions = {agent: bank.version(agent).name for agent in "abc"}
    small = make_team(["a"], context_tokens=64)
    with pytest.raises(UserError, match="longer than the context"):
        play(small, Task(), sampler, plan([ITEMS[0], Item("long", "x" * 100)], 2), versions)
    assert len(play(small, Task(), sampler, plan(ITEMS[:2], 2), versions)) == 4


class Guess(Interaction):
    """Say the number; the environment answers higher or lower, pays 0.1 for a try and 1 for the hit."""

    def feed(self, message: Message) -> Feedback:
        digits = "".join(ch for ch in message.text if ch.isdigit())
        if not digits:
            return Feedback(None, 0.0)
        if int(digits) == self.item.data["number"]:
            return Feedback("right", 1.0, done=True)
        return Feedback("higher" if int(digits) < self.item.data["number"] else "lower", 0.1)


class GuessingGame(Task):
    reward_range = (0.0, 2.0)

    def open(self, item: Item) -> Interaction:
        return Guess(item)

    def success(self, reward: float) -> bool:
        return reward >= 1.0


@pytest.mark.parametrize("view", ["shared", "per_agent"])
def test_an_environment_that_answers_back(make_team: MakeTeam, view: str) -> None:
    team = make_team(["a", "b"], view=view, router={"rounds": 4})
    seen: list[str] = []

    def binary_search(request: Request) -> str:
        text = team.protocol.chat.decode(request.prompt_ids)
        seen.append(text)
        turn = text.count("higher") + text.count("lower")
        return ["hm", "50", "75", "62"][0 if "hm" not in text else 1 + turn]

    item = Item("n62", "Guess!", {"number": 62})
    episode = play(team, GuessingGame(), FakeSampler(team, say=binary_search), plan([item], 1), VERSIONS)[0]
    assert [m.text for m in episode.messages] == ["hm", "50", "75", "62"]
    assert episode.feedback == [None, "higher", "lower", "right"]
    assert episode.rewards == pytest.approx([0.0, 0.1, 0.1, 1.0]), "rewards belong to the message that earned them"
    assert episode.ended == "task" and episode.success and episode.discounted_return(0.5) == pytest.approx(0.05 + 0.025 + 0.125)
    assert "higher" in seen[2] and "lower" in seen[3] and "right" not in seen[3]
    record = episode_record(episode)
    assert [m["feedback"] for m in record["messages"]] == episode.feedback
    assert record["ended"] == "task" and record["messages"][0]["version"] == "v0000-a"


@pytest.mark.parametrize(
    ("within", "told"),
    [((0.0, 1.0), ["item 'n62' got reward 1.1, outside GuessingGame.reward_range = [0, 1]"]), ((0.0, 1.1), []),
     ((2, 3), ["item 'n62' got reward 1.1, outside GuessingGame.reward_range = [2, 3]"])],
)  # fmt: skip
def test_a_whole_reward_outside_its_range_is_told_once(
    make_team: MakeTeam, caplog: pytest.LogCaptureFixture, within: tuple[float, float], told: list[str]
) -> None:
    """Neither message's reward is outside; what the episode earned is."""
    team, task = make_team(["a", "b"]), GuessingGame()
    task.reward_range = within
    sampler = FakeSampler(team, say=lambda request: "62" if "lower" in team.protocol.chat.decode(request.prompt_ids) else "99")
    for _ in range(2):
        play(team, task, sampler, plan([Item("n62", "Guess!", {"number": 62})], 2), VERSIONS)
    assert [record.message.partition(":")[0] for record in caplog.records] == told


def test_half_a_character_of_an_environment_is_kept_as_it_was_read(make_team: MakeTeam, tmp_path: Path) -> None:
    """A lone surrogate can be neither encoded nor stored: the episode says what the agents saw, and can be read back."""

    class Cut(Interaction):
        def feed(self, message: Message) -> Feedback:
            return Feedback("lower\ud83d", 0.0)

    class Cutting(GuessingGame):
        def open(self, item: Item) -> Interaction:
            return Cut(item)

    team = make_team(["a", "b"])
    episode = play(team, Cutting(), FakeSampler(team, say=lambda request: "50"), plan([Item("n", "Guess\ud83d")], 1), VERSIONS)[0]
    assert (episode.prompt, episode.feedback) == ("Guess?", ["lower?", "lower?"])
    store = RolloutStore(tmp_path)
    assert store.read("r", store.write("r", [episode]))[0].feedback == episode.feedback


def test_a_router_that_lets_nobody_speak_gives_an_empty_scored_episode(make_team: MakeTeam) -> None:
    team = make_team(["a", "b"])
    silent = Team(team.names, team.protocol, type(team.router)(lambda messages: None, 2), team.context_tokens, team.on_overflow)
    episodes = play(silent, Counting(), FakeSampler(silent), plan(), VERSIONS)
    assert [(e.messages, e.rewards, e.success) for e in episodes] == [([], [0.0], False)] * 6


def test_progress_reaches_the_total(make_team: MakeTeam) -> None:
    team = make_team(["a", "b"])
    calls: list[tuple[int, int, int]] = []
    episodes = play(team, Task(), FakeSampler(team), plan(), VERSIONS, lambda *call: calls.append(call))
    assert calls[-1] == (6, 6, sum(e.tokens for e in episodes))
    assert [c[0] for c in calls] == sorted(c[0] for c in calls)


def test_derived_seeds_are_63_bit_and_spread() -> None:
    seeds = [derive_seed("x", n) for n in range(1000)]
    assert len(set(seeds)) == 1000 and all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed("x", 1) == derive_seed("x", 1) != derive_seed("x", "1", "")


class Paid(Interaction):
    """Pays as the item says: by turn, (reward, credit); a coroutine at even turns."""

    def feed(self, message: Message) -> Any:
        reward, credit = self.item.data["pay"][message.turn]
        feedback = Feedback("on", reward, credit=credit)

        async def later() -> Feedback:
            await asyncio.sleep(0.001)
            return feedback

        return later() if message.turn % 2 == 0 else feedback


class Paying(Task):
    def open(self, item: Item) -> Interaction:
        return Paid(item)

    def credit(self, episodes: Sequence[Episode]) -> list[Any]:
        return [episode.item.data.get("last") for episode in episodes]


def paid(team: Team, *items: dict[str, Any]) -> list[Episode]:
    played = [Item(f"p{n}", "go", data) for n, data in enumerate(items)]
    return play(team, Paying(), FakeSampler(team), plan(played, 1), VERSIONS)


def test_credit_by_agent_is_as_long_as_the_rewards_and_the_team_keeps_its_own(make_team: MakeTeam) -> None:
    team = make_team(["a", "b"])
    first, second = paid(
        team,
        {"pay": [(0.25, {"a": 0.25}), (0.5, {"a": 0.125, "b": 0.375})], "last": {"b": 0.5}},
        {"pay": [(1.0, None), (0.0, None)]},
    )
    assert first.rewards == [0.25, 0.5] and first.credit == {"a": [0.25, 0.125], "b": [0.0, 0.875]}
    assert second.credit == {"a": [0.0, 0.0], "b": [0.0, 0.0]}, "a task that gives credit anywhere gives it everywhere"
    assert (first.discounted_return(0.5, "b"), first.discounted_return(0.5)) == (0.4375, 0.5)
    assert episode_record(first)["credit"] == {"a": 0.375, "b": 0.875} and first.reward == 0.75


def test_without_credit_every_agent_has_the_teams_reward(make_team: MakeTeam) -> None:
    (episode,) = paid(make_team(["a", "b"]), {"pay": [(0.25, None), (0.5, None)]})
    assert episode.credit == {} and episode.discounted_return(1.0, "a") == 0.75 and "credit" not in episode_record(episode)


@pytest.mark.parametrize(
    ("pay", "said"),
    [
        ([(0.0, {"aa": 1.0})], "gave credit to 'aa', who is no agent of the team; it has a, b"),
        ([(float("nan"), None)], "gave a reward of nan; it must be a finite number"),
        ([(0.0, {"b": "much"})], "gave a credit for b of 'much'; it must be a finite number"),
        ([], "Paid raised IndexError: list index out of range (test_collector.py line "),
    ],
)
def test_what_an_environment_does_wrong_is_one_line(make_team: MakeTeam, pay: list[Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        paid(make_team(["a", "b"]), {"pay": pay})
    assert said in str(error.value) and str(error.value).startswith("item 'p0': ") and "\n" not in str(error.value)


def test_feedback_of_a_wrong_type_is_one_line(make_team: MakeTeam) -> None:
    class Silent(Interaction):
        def feed(self, message: Message) -> Any:
            return None

    class Nobody(Task):
        def open(self, item: Item) -> Interaction:
            return Silent(item)

    team = make_team(["a", "b"])
    with pytest.raises(UserError, match=r"item 'i0': Silent\.feed returned None; it must return a Feedback"):
        play(team, Nobody(), FakeSampler(team), plan(), VERSIONS)


def test_an_error_in_what_counts_as_right_is_one_line(make_team: MakeTeam) -> None:
    class Picky(Counting):
        def success(self, reward: float) -> bool:
            raise KeyError("threshold")

    team = make_team(["a", "b"])
    with pytest.raises(UserError, match=r"Picky raised KeyError: 'threshold' \(test_collector\.py line \d+\)"):
        play(team, Picky(), FakeSampler(team), plan(), VERSIONS)


@pytest.mark.parametrize(
    ("method", "returned", "said"),
    [
        ("answer", 7, "Odd.answer returned 7; it must return a text or None"),
        ("vote", ["a"], "Odd.vote returned ['a']; it must return a text or None"),
        ("categories", {"level": 5}, "Odd.categories returned {'level': 5}; it must return texts by name"),
        ("categories", None, "Odd.categories returned None; it must return texts by name"),
        ("score", 1.0, "Odd.score returned 1.0; it must return one number for each episode"),
        ("credit", {"a": 1.0}, "Odd.credit returned {'a': 1.0}; it must return one mapping or None for each episode"),
        ("credit", [1.0], "item 'i0': the task gave a credit of 1.0; it must be numbers by agent, or None"),
        ("open", "hello", "Odd.open returned 'hello'; it must return an Interaction"),
        ("first", 3, "item 'i0': Opening.first returned 3; it must return a text"),
        ("part", ZeroDivisionError("one"), "Odd.part raised ZeroDivisionError: one (test_collector.py line "),
    ],
)
def test_what_a_task_returns_is_checked_in_one_line(method: str, returned: Any, said: str, make_team: MakeTeam) -> None:
    def give(*_: Any) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    class Opening(Interaction):
        first = give if method == "first" else Interaction.first

    odd = {"open": lambda self, item: Opening(item)} if method == "first" else {method: give}
    task, team = type("Odd", (Counting,), {"__module__": __name__, **odd})(), make_team(["a"])
    with pytest.raises(UserError) as error:
        for episode in play(team, task, FakeSampler(team), plan(ITEMS[:1], 1), VERSIONS):
            judge(Attempt.of(episode), task)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_recipe_says_how_to_sample_and_a_probe_how_often() -> None:
    rollout = RolloutSection(episodes_per_item=6, temperature=0.7, max_message_tokens=33)
    items = [Item("one", "1")]
    assert PlayPlan.of(rollout, items, "why") == PlayPlan(
        items, episodes_per_item=6, temperature=0.7, max_message_tokens=33, purpose="why"
    )
    assert PlayPlan.of(rollout, items, "why", 2).episodes_per_item == 2
