"""Credit by agent: by hand, by enumeration of every episode there can be, and through the collector."""

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import load_recipe
from teamtr_lora.rollout.collector import play
from teamtr_lora.rollout.credit import MOST_OTHERS, beside_others, credit_agents, own_answers, recredited
from teamtr_lora.rollout.sampler import Completion
from teamtr_lora.study.plan import make_plan
from teamtr_lora.tasks import Feedback, Interaction, Item, Rewards, Task
from teamtr_lora.tasks.dataset import DatasetTask
from teamtr_lora.tasks.generated.distinct import Distinct
from teamtr_lora.team import Episode, Message, Team
from teamtr_lora.training.trainer import TeamTRTrainer
from tests.rollout.test_answers import VERSIONS, Echo, plan

BLIND = {"kind": "blind"}
QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"


class ByText(Task):
    """The answer's text is its score."""

    def __init__(self) -> None:
        self.scored: list[str] = []

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        self.scored += [episode.answer_text for episode in episodes]
        return [float(episode.answer_text) for episode in episodes]


def said(turn: int, agent: str, text: str) -> Message:
    return Message(agent, turn, [], [1], [0.0], "v0000-x", "stop", text)


def test_own_answers_replace_their_share_of_the_last_reward(make_team: Callable[..., Team]) -> None:
    messages = [said(0, "a", "0.2"), said(1, "b", "1.0"), said(2, "a", "0.6")]
    # a's first message was not its last; b's second-to-last is the team's answer; c never spoke; 0.1 came before the end
    episode = Episode(item_id="i", group=0, prompt="", seed=0, item=Item("i", "", {}), messages=messages)
    episode.rewards, episode.answer_turn = [0.1, 0.0, 1.0], 1
    task = ByText()
    credit_agents(task, replace(make_team(["a", "b", "c"]), own_answer_share=0.25), [episode], [1.0])
    assert episode.credit == {"a": [0.1, 0.0, 0.75 + 0.25 * 0.6], "b": [0.1, 0.0, 1.0], "c": [0.1, 0.0, 1.0]}
    assert task.scored == ["0.6"], "the team's answer is not scored twice"
    assert episode.discounted_return(1.0, "a") == 0.1 + 0.9


class FirstSpeaker(Task):
    """Right is what the first agent says."""

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        return [float(episode.answer_message.agent == "a") for episode in episodes]  # type: ignore[union-attr]


def test_a_team_says_how_much_own_answers_count(make_team: Callable[..., Team]) -> None:
    def credit(**settings: Any) -> list[dict[str, list[float]]]:
        team = replace(make_team(["a", "b"]), **settings)
        episodes = play(team, FirstSpeaker(), Echo(team), plan(), VERSIONS)  # type: ignore[arg-type]
        assert {episode.reward for episode in episodes} == {0.0}, "b speaks last"
        return [episode.credit for episode in episodes]

    assert not any(credit())
    assert credit(own_answer_share=0.5) == [{"a": [0.0, 0.5], "b": [0.0, 0.0]}] * 12


def test_where_the_score_is_made_of_several_messages_none_is_an_answer_of_its_own(tmp_path: Path) -> None:
    """Planning and training say so before anything is played."""
    recipe = load_recipe(QUICKSTART, ["team.own_answer_share=0.5", f"output_dir={tmp_path / 'run'}"])
    refused = r"^team\.own_answer_share = 0\.5: column_sum scores several messages.*leave it out, or .*task\.digits=1\)$"
    with pytest.raises(UserError, match=refused):
        make_plan(recipe)
    with TeamTRTrainer.from_recipe(recipe) as trainer, pytest.raises(UserError, match=refused):
        trainer.train()
    make_plan(load_recipe(QUICKSTART, ["team.own_answer_share=0.5", "task.digits=1"]))


def test_whoever_scores_reads_messages_as_they_were_spoken_and_is_told_which_answers(make_team: Callable[..., Team]) -> None:
    """One says 4, then the other 5, and the vote is a's: b's answer is asked for once more, as what b would have earned."""
    team = replace(make_team(["a", "b"], router={"kind": "round_robin", "answer": "majority"}), own_answer_share=1.0)
    seen = []

    class Says(Echo):
        def poll(self) -> list[Completion]:
            asked = {ticket: self.team.protocol.chat.encode({"a": "4", "b": "5"}[r.agent]) for ticket, r in self.queue.items()}
            return [replace(c, token_ids=asked[c.ticket] + c.token_ids[-1:], logprobs=[-1.0, -1.0]) for c in super().poll()]

    def reward(completions: list[str], messages: list[list[dict[str, str]]], episodes: list[Episode]) -> list[float]:
        for said, spoken, episode in zip(completions, messages, episodes, strict=True):
            seen.append((said, *(message["content"] for message in spoken), episode.answer_turn))
        return [float(said == "5") for said in completions]

    rows = [{"prompt": f"2+{n}"} for n in range(6)]
    task = DatasetTask(rows, rows, Rewards([reward]), answer=lambda text: text)
    episodes = play(team, task, Says(team), replace(plan(), items=list(task.items("train"))), VERSIONS)  # type: ignore
    assert seen == [("4", "4", "5", 0)] * 12 + [("5", "4", "5", 1)] * 12
    assert [episode.credit for episode in episodes] == [{"a": [0.0, 0.0], "b": [0.0, 1.0]}] * 12


# --- beside the others' messages


def spoken(group: int, *texts: str, **more: Any) -> Episode:
    messages = [said(turn, "abc"[turn], text) for turn, text in enumerate(texts)]
    return Episode(item_id="i", group=group, prompt="", seed=0, item=Item("i", "", more), messages=messages)


def mean_worth(*given: Any) -> dict[tuple[int, str], float]:
    return {place: math.fsum(met) / len(met) for place, met in beside_others(*given).items()}


def test_a_message_is_worth_its_mean_reward_beside_all_others_of_its_group(make_team: Callable[..., Team]) -> None:
    """Two digits on offer. In the first group the agents clash in one of three episodes; an episode that broke off counts as it
    is, and so does the other group's."""
    team, task = make_team(["a", "b"], router=BLIND, view="per_agent"), Distinct(options=2)
    episodes = [spoken(0, *texts, options=[1, 2]) for texts in ("11", "12", "21", "2")] + [spoken(1, "1", "1", options=[1, 2])]
    rewards = task.score(episodes)
    assert rewards == [0, 1, 1, 1, 0]
    found = mean_worth(task, team, episodes, rewards)
    # a said 1, 1, 2 and b said 1, 2, 1: who said 1 stands apart from one of the three, who said 2 from two
    assert found == {(0, "a"): 1 / 3, (1, "a"): 1 / 3, (2, "a"): 2 / 3, (0, "b"): 1 / 3, (1, "b"): 2 / 3, (2, "b"): 1 / 3}
    for episode, reward in zip(episodes, rewards, strict=True):
        episode.rewards = [0.25] * (len(episode.messages) - 1) + [reward]
    credit_agents(task, replace(team, recombine=True), episodes, rewards)
    last = [episode.credit["a"].pop() for episode in episodes]
    assert last == [1 / 3, 1 / 3, 2 / 3, 1, 0], "to the last bit: a group of equals has nothing to learn from"
    assert [episode.credit["a"] for episode in episodes] == [[0.25]] * 3 + [[], [0.25]]


class Table(Task):
    """A reward for each pair of words."""

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        worth = {"xx": 0.1, "xy": 0.9, "yx": 0.4, "yy": 0.3}
        return [worth["".join(message.text for message in episode.messages)] for episode in episodes]


def test_the_expected_gradient_stays_the_same_and_its_variance_falls(make_team: Callable[..., Team]) -> None:
    """Every group of three episodes that two agents can play, with its probability; advantages as of `leave_one_out`."""
    team, task, size = make_team(["a", "b"], router=BLIND, view="per_agent"), Table(), 3
    chance = {"a": {"x": 0.3, "y": 0.7}, "b": {"x": 0.6, "y": 0.4}}  # softmax: d log p(word) / d logit of x = [word is x] - p(x)
    moments = {"as played": np.zeros(2), "recombined": np.zeros(2)}
    for words in itertools.product("xy", repeat=2 * size):
        episodes = [spoken(0, *words[2 * place : 2 * place + 2]) for place in range(size)]
        rewards, likely = task.score(episodes), float(np.prod([chance["ab"[n % 2]][word] for n, word in enumerate(words)]))
        beside = mean_worth(task, team, episodes, rewards)
        for name, worth in (("as played", rewards), ("recombined", [beside[at, "a"] for at in range(size)])):
            slopes = [(episode.messages[0].text == "x") - chance["a"]["x"] for episode in episodes]
            gradient = float(np.dot(slopes, np.array(worth) - np.mean(worth))) / (size - 1)
            moments[name] += likely * np.array([gradient, gradient**2])
    worths = {"x": 0.6 * 0.1 + 0.4 * 0.9, "y": 0.6 * 0.4 + 0.4 * 0.3}
    exact = 0.3 * 0.7 * (worths["x"] - worths["y"])
    for name, (mean, _) in moments.items():
        assert mean == pytest.approx(exact, abs=1e-12), name
    deviation = {name: square - mean**2 for name, (mean, square) in moments.items()}
    assert deviation["recombined"] < 0.5 * deviation["as played"]


class Voted(ByText):
    scores_the_answer_alone = True

    def __init__(self) -> None:
        super().__init__()
        self.read: Counter[int] = Counter()

    def vote(self, episode: Episode) -> str | None:
        self.read[id(episode.messages[-1])] += 1
        return super().vote(episode)

    def answer(self, text: str) -> str | None:
        return text[-1] if text != "0" else None


def test_a_vote_is_counted_anew_and_no_answer_is_read_or_scored_twice(make_team: Callable[..., Team]) -> None:
    """Against putting every episode together and scoring it. Equal answers may have different scores here."""
    rng, team = random.Random(0), make_team(["a", "b", "c"], router={"kind": "debate"}, view="per_agent")
    for _ in range(20):
        texts = ["0", "0.5", "1.5", "2.5", "0.1", "0.2", "0.3"]
        episodes = [spoken(n % 2, *rng.choices(texts, k=3)) for n in range(8)]
        task, plain = Voted(), Voted()
        for episode in episodes:
            episode.answer_turn = team.answer_turn(episode, plain.vote)
        rewards = plain.score(episodes)
        found = mean_worth(task, team, episodes, rewards)
        assert len(task.scored) <= 3 * 8 - 8 and max(task.read.values()) == 1, "the answers as played are known"
        for at, episode in enumerate(episodes):
            for turn, agent in enumerate("abc"):
                met = []
                for other in episodes:
                    if other.group == episode.group:
                        messages = [m if m.turn != turn else episode.messages[turn] for m in other.messages]
                        remade = replace(other, messages=messages, answer_turn=None)
                        remade.answer_turn = team.answer_turn(remade, plain.vote)
                        met += plain.score([remade])
                assert found[at, agent] == pytest.approx(np.mean(met), abs=1e-12)


class Terse(Voted):
    """Also looks at what does not answer."""

    scores_the_answer_alone = False

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        assert not any(sum(episode.rewards) or episode.success for episode in episodes), "as a task sees an episode at its end"
        return [-float(sum(len(message.text) for message in episode.messages)) for episode in episodes]


def test_a_reward_that_looks_at_all_messages_blames_the_one_who_wrote_them(make_team: Callable[..., Team]) -> None:
    team, task = make_team(["a", "b", "c"], router={"kind": "debate"}, view="per_agent"), Terse()
    episodes = [spoken(0, "1", "1", "1"), spoken(0, "1", "1", "1 1 1")]
    for episode in episodes:
        episode.answer_turn = team.answer_turn(episode, task.vote)
    rewards = task.score(episodes)
    for episode, reward in zip(episodes, rewards, strict=True):
        episode.rewards, episode.success = [0.0, 0.0, reward], True
    found = mean_worth(task, team, episodes, rewards)
    assert found == {(0, "a"): -5, (1, "a"): -5, (0, "b"): -5, (1, "b"): -5, (0, "c"): -3, (1, "c"): -7}


def test_only_episodes_that_began_alike_are_recombined_and_not_too_many(make_team: Callable[..., Team]) -> None:
    team, task = make_team(["a", "b"], router=BLIND, view="per_agent"), Table()
    other = [replace(spoken(0, "x", "y"), prompt="?"), spoken(0, "y", "x")]
    assert mean_worth(task, team, other, task.score(other)) == {}
    many = [spoken(0, "xy"[n < 10], "x") for n in range(40)]
    rewards = task.score(many)
    found = mean_worth(task, team, many, rewards)
    assert len(found) == 80 and {found[at, "a"] for at in range(40)} == {0.1, 0.4}
    met = [rewards[0]] + [rewards[(1 + n) % 40] for n in range(MOST_OTHERS)]
    assert found[0, "b"] == pytest.approx(np.mean(met)) and found[0, "b"] != found[20, "b"]


class Whimsical(Table):
    """Gives what is asked for more than once something else."""

    def __init__(self, later: Any) -> None:
        self.later, self.asked = later, 0

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        assert episodes, "asked about nothing"
        self.asked += 1
        return [0.5] * len(episodes) if self.asked == 1 else self.later(len(episodes))


Estimate = Callable[[np.ndarray, np.ndarray, list[Episode]], list[float]]


def weighted(own_E: np.ndarray, others_E: np.ndarray, episodes: list[Episode]) -> list[float]:
    """What the updater makes of it: each message's own weight times its advantage over the others of its group."""
    worth_E = np.array([e.credit["a"][-1] for e in recredited(episodes, "a", others_E)])
    mean_E = ((own_E * worth_E).sum() - own_E * worth_E) / (own_E.sum() - own_E)
    return list(own_E * (worth_E - mean_E))


WRONG: dict[str, Estimate] = {
    "nothing weighted": lambda own, others, e: weighted(np.ones(3), np.ones(3), e),
    "the message alone weighted": lambda own, others, e: weighted(own, np.ones(3), e),
    "the others alone weighted": lambda own, others, e: weighted(np.ones(3), others, e),
    "both as one weight": lambda own, others, e: weighted(own * others, np.ones(3), e),
    "weights the other way round": lambda own, others, e: weighted(own, 1 / others, e),
    "without the group's mean weight": lambda own, others, e: list(np.array(weighted(own, others, e)) / others.mean()),
}


def test_recombined_messages_of_an_earlier_team_have_todays_expected_gradient(make_team: Callable[..., Team]) -> None:
    """Both agents have changed since. Every group of three episodes that the earlier team can play, with its probability."""
    team, task, size = make_team(["a", "b"], router=BLIND, view="per_agent"), Table(), 3
    then = {"a": {"x": 0.55, "y": 0.45}, "b": {"x": 0.3, "y": 0.7}}
    now = {"a": {"x": 0.3, "y": 0.7}, "b": {"x": 0.6, "y": 0.4}}
    means: dict[str, float] = defaultdict(float)
    for words in itertools.product("xy", repeat=2 * size):
        episodes = [spoken(0, *words[2 * place : 2 * place + 2]) for place in range(size)]
        rewards, likely = task.score(episodes), float(np.prod([then["ab"[n % 2]][word] for n, word in enumerate(words)]))
        for episode, reward in zip(episodes, rewards, strict=True):
            episode.rewards = [0.0, reward]
        credit_agents(task, replace(team, recombine=True), episodes, rewards)
        own_E, others_E = (np.array([now[a][w] / then[a][w] for w in words[n::2]]) for n, a in enumerate("ab"))
        slopes = [(episode.messages[0].text == "x") - now["a"]["x"] for episode in episodes]
        for name, estimate in {"ours": weighted, **WRONG}.items():
            means[name] += likely * float(np.dot(slopes, estimate(own_E, others_E, episodes))) / size
    worths = {"x": 0.6 * 0.1 + 0.4 * 0.9, "y": 0.6 * 0.4 + 0.4 * 0.3}
    exact = 0.3 * 0.7 * (worths["x"] - worths["y"])
    assert means.pop("ours") == pytest.approx(exact, abs=1e-12)
    for name, mean in means.items():
        assert abs(mean - exact) > 0.02 * abs(exact), name


def test_only_what_was_recombined_is_weighted_anew(make_team: Callable[..., Team]) -> None:
    """Half of the credit is for an agent's own answer, some came before the end; the third episode is alone in its group, and
    two more of the first one began otherwise."""
    team, task = replace(make_team(["a", "b"], router=BLIND, view="per_agent"), recombine=True, own_answer_share=0.5), Table()
    episodes = [spoken(0, "x", "y"), spoken(0, "y", "x"), spoken(1, "x", "x")]
    episodes += [replace(spoken(0, *words), prompt="?") for words in ("xy", "yx")]
    for episode, reward in zip(episodes, task.score(episodes), strict=True):
        episode.rewards = [0.25, reward + 0.125]
    credit_agents(task, team, episodes, task.score(episodes))
    found = recredited(episodes, "a", np.array([1.0, 2.0, 3.0, 1.0, 1.0]))
    assert [e.credit["a"][:-1] for e in found] == [[0.25]] * 5 and found[2] is episodes[2]
    # x beside y and x: 0.9 and 0.1; y beside x and y, from its own episode on: 0.4 and 0.3
    shifts = [0.5 * (1.5 * (0.9 + 2 * 0.1) / 3 - 0.5), 0.5 * (1.5 * (2 * 0.4 + 0.3) / 3 - 0.35)]
    assert [e.credit["a"][-1] - b.credit["a"][-1] for e, b in zip(found, episodes, strict=True)] == pytest.approx(
        [*shifts, 0.0, 0.0, 0.0]
    )


@pytest.mark.parametrize(
    ("later", "said"),
    [(lambda n: [float("nan")] * n, "item 'i0': the task gave a reward of nan"), (lambda n: [1.0], "returned 1 values for")],
)
def test_rewards_of_recombined_episodes_are_checked(make_team: Callable[..., Team], later: Any, said: str) -> None:
    team = replace(make_team(["a", "b"], router=BLIND, view="per_agent"), recombine=True)
    with pytest.raises(UserError, match=said):
        play(team, Whimsical(later), Echo(team), plan(), VERSIONS)  # type: ignore[arg-type]
    for unasked in (replace(plan(), episodes_per_item=1), replace(plan(), learned_from=False)):
        episodes = play(team, Whimsical(later), Echo(team), unasked, VERSIONS)  # type: ignore[arg-type]
        assert {episode.reward for episode in episodes} == {0.5}


def test_both_kinds_of_credit_share_the_last_reward(make_team: Callable[..., Team]) -> None:
    team, task = make_team(["a", "b", "c"], router={"kind": "debate"}, view="per_agent"), Voted()
    episodes = [spoken(0, "0.5", "1.5", "0.2"), spoken(0, "0.2", "2.5", "0.2")]
    for episode in episodes:
        episode.answer_turn = team.answer_turn(episode, task.vote)
        episode.rewards = [0.0, 0.0, *task.score([episode])]
    rewards = [episode.rewards[-1] for episode in episodes]
    assert rewards == [0.5, 0.2]
    own, beside = own_answers(task, episodes), mean_worth(task, team, episodes, rewards)
    credit_agents(task, replace(team, own_answer_share=0.25, recombine=True), episodes, rewards)
    for at, episode in enumerate(episodes):
        for agent in "abc":
            mixed = 0.25 * own.get((at, agent), rewards[at]) + 0.75 * beside[at, agent]
            assert episode.credit[agent] == pytest.approx([0.0, 0.0, mixed])
    assert beside[0, "c"] != rewards[0] != own[0, "c"]


class Listening(Task):
    class _Back(Interaction):
        def feed(self, message: Message) -> Feedback:
            return Feedback("go on")

    def open(self, item: Item) -> Interaction:
        return self._Back(item)


def test_a_team_recombines_what_it_played_unless_the_task_answers(make_team: Callable[..., Team]) -> None:
    team = replace(make_team(["a", "b"], router=BLIND, view="per_agent"), recombine=True)
    episodes = play(team, FirstSpeaker(), Echo(team), plan(), VERSIONS)  # type: ignore[arg-type]
    assert [episode.credit for episode in episodes] == [{"a": [0.0, 0.0], "b": [0.0, 0.0]}] * 12
    assert len(play(team, Listening(), Echo(team), replace(plan(), learned_from=False), VERSIONS)) == 12  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"team\.recombine: this task answers messages.*leave it out"):
        play(team, Listening(), Echo(team), plan(), VERSIONS)  # type: ignore[arg-type]
