"""Who answers in an evaluation: the team, or an inference-time baseline on the same base, task and sampler.

Each policy turns items into attempts through `collector.play`, so that all of them batch, and are scored, by the same code. The
baselines play one agent: the frozen base (a fresh adapter changes nothing), or one agent of the team. Their default budget is
what a team's episode may sample: its messages times rollout.max_message_tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from teamtr_lora.common.errors import UserError
from teamtr_lora.evaluation.outcome import Attempt
from teamtr_lora.rollout.collector import PlayPlan, Progress
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.tasks import Item, Task
from teamtr_lora.team import Episode, build_router

STEP_BY_STEP = "Think step by step, then give the answer in the form that is asked for."
THOUGHT = "{problem}\n\n{so_far}Write only the next step of the solution, in a few lines. Do not give the final answer yet."
JUDGEMENT = (
    "{problem}\n\n{so_far}How likely do these steps lead to the right answer? Reply with one whole number from 1 (they are "
    "wrong) to 10 (they are surely right)."
)
CONCLUSION = "{problem}\n\n{so_far}Finish the solution from here and give the answer in the form that is asked for."
NUMBER = re.compile(r"(?<![0-9.])(10|[1-9])(?![0-9])")
JUDGEMENT_TOKENS = 8
SHORTEST_THOUGHT = 16  # tokens
CONCLUSION_SHARE = 3  # a third of the budget is kept for the answer


class Policy(Protocol):
    def attempts(self, items: Sequence[Item], groups: Sequence[int], k: int, progress: Progress | None) -> list[Attempt]:
        """k attempts at every item, item by item; `groups` are the items' numbers in the whole evaluation."""
        ...


@dataclass(frozen=True)
class Played:
    """The team's own episodes, or one agent's (chain of thought: the agent was told to think step by step)."""

    playable: PlayableTeam
    task: Task
    temperature: float
    max_message_tokens: int
    purpose: str

    def attempts(self, items: Sequence[Item], groups: Sequence[int], k: int, progress: Progress | None) -> list[Attempt]:
        return [Attempt.of(episode) for episode in self.play(items, groups, k, progress)]

    def play(self, items: Sequence[Item], groups: Sequence[int], count: int, progress: Progress | None) -> list[Episode]:
        plan = PlayPlan(
            items,
            episodes_per_item=count,
            temperature=self.temperature,
            max_message_tokens=self.max_message_tokens,
            purpose=self.purpose,
            groups=groups,
            learned_from=False,
        )
        return self.playable.play(self.task, plan, progress)


@dataclass(frozen=True)
class SelfConsistency:
    """Each attempt is the most frequent answer of `votes` chains of thought (Wang et al., 2022).

    Answers with equally many votes: the one stated first, which is a fair draw as the samples are exchangeable.
    """

    chain: Played
    votes: int

    def attempts(self, items: Sequence[Item], groups: Sequence[int], k: int, progress: Progress | None) -> list[Attempt]:
        def scaled(done: int, total: int, tokens: int) -> None:
            if progress:
                progress(done // self.votes, total // self.votes, tokens)

        episodes = self.chain.play(items, groups, k * self.votes, scaled)
        ballots = [episodes[start : start + self.votes] for start in range(0, len(episodes), self.votes)]
        return [self._elected(ballot) for ballot in ballots]

    def _elected(self, ballot: list[Episode]) -> Attempt:
        votes = [self.chain.task.vote(episode) for episode in ballot]
        counted = Counter(vote for vote in votes if vote is not None)
        place = votes.index(counted.most_common(1)[0][0]) if counted else 0  # most_common keeps the order of first sight
        return Attempt.of(ballot[place], *ballot[:place], *ballot[place + 1 :])


@dataclass(frozen=True)
class Tree:
    breadth: int  # next steps tried from each state
    depth: int  # steps before the answer
    beam: int  # states kept after each step
    budget: int  # most tokens sampled for one answer, in all

    @property
    def thoughts(self) -> int:
        """Of all levels together."""
        total, states = 0, 1
        for _ in range(self.depth):
            total += states * self.breadth
            states = min(self.beam, states * self.breadth)
        return total

    @property
    def conclusion_tokens(self) -> int:
        return self.budget // CONCLUSION_SHARE

    @property
    def thought_tokens(self) -> int:
        return (self.budget - self.conclusion_tokens) // self.thoughts - JUDGEMENT_TOKENS

    def smallest_budget(self) -> int:
        needed = self.thoughts * (SHORTEST_THOUGHT + JUDGEMENT_TOKENS)
        return CONCLUSION_SHARE * (needed - 1) // (CONCLUSION_SHARE - 1) + 1

    def check(self) -> None:
        if self.thought_tokens < SHORTEST_THOUGHT:
            raise UserError(
                f"--tokens {self.budget}: this tree has {self.thoughts} thoughts and needs {self.smallest_budget()} tokens an "
                "answer; raise it, or use a smaller --breadth, --depth or --beam"
            )


@dataclass
class _State:
    """One partial solution of one attempt."""

    attempt: int
    steps: tuple[str, ...] = ()
    worth: int = 0


@dataclass(frozen=True)
class TreeOfThoughts:
    """Breadth-first search over steps, judged by the model itself (Yao et al., 2023); all attempts move level by level together.

    The budget is kept by construction: every thought, judgement and the answer has its own limit, and they add up to it.
    """

    solver: PlayableTeam
    task: Task
    tree: Tree
    temperature: float
    purpose: str
    messages: int  # of the answer: 1, or what the task needs

    def attempts(self, items: Sequence[Item], groups: Sequence[int], k: int, progress: Progress | None) -> list[Attempt]:
        owners = [(item, group * k + sample) for item, group in zip(items, groups, strict=True) for sample in range(k)]
        spent: list[list[Episode]] = [[] for _ in owners]
        beams = [[_State(number)] for number in range(len(owners))]
        for level in range(self.tree.depth):
            states = [state for beam in beams for state in beam]
            grown = self._grow(states, owners, spent, level)
            self._judge(grown, owners, spent, level)
            beams = [[] for _ in owners]
            for state in sorted(grown, key=lambda s: -s.worth):  # stable: equal ones in the order they were sampled
                if len(beams[state.attempt]) < self.tree.beam:
                    beams[state.attempt].append(state)
        final = self._conclude([beam[0] for beam in beams], items, groups, k)
        if progress:
            progress(len(owners), len(owners), sum(e.tokens for e in final) + sum(e.tokens for es in spent for e in es))
        return [Attempt.of(episode, *others) for episode, others in zip(final, spent, strict=True)]

    def _grow(self, states: list[_State], owners: list[tuple[Item, int]], spent: list[list[Episode]], level: int) -> list[_State]:
        episodes = self._ask(THOUGHT, states, owners, f"thought {level}", self.tree.breadth, self.tree.thought_tokens)
        grown = []
        for place, episode in enumerate(episodes):
            state = states[place // self.tree.breadth]
            spent[state.attempt].append(episode)
            grown.append(_State(state.attempt, (*state.steps, episode.messages[-1].text.strip())))
        return grown

    def _judge(self, states: list[_State], owners: list[tuple[Item, int]], spent: list[list[Episode]], level: int) -> None:
        """A reply without a number from 1 to 10 is worth 0, less than any number."""
        episodes = self._ask(JUDGEMENT, states, owners, f"judgement {level}", 1, JUDGEMENT_TOKENS)
        for state, episode in zip(states, episodes, strict=True):
            spent[state.attempt].append(episode)
            found = NUMBER.search(episode.messages[-1].text)
            state.worth = int(found[1]) if found else 0

    def _ask(
        self, form: str, states: list[_State], owners: list[tuple[Item, int]], purpose: str, count: int, tokens: int
    ) -> list[Episode]:
        """One unscored message for every state, `count` times. A state's number keeps its seeds apart from the others'."""
        items, groups, seen = [], [], Counter[int]()
        for state in states:
            item, number = owners[state.attempt]
            items.append(Item(f"{item.id}/{number}", form.format(problem=item.prompt, so_far=_so_far(state))))
            groups.append(number * self.tree.thoughts + seen[state.attempt])
            seen[state.attempt] += 1
        return self._sampled(one_message(self.solver), Task(), tokens, purpose).play(items, groups, count, None)

    def _sampled(self, playable: PlayableTeam, task: Task, tokens: int, purpose: str) -> Played:
        return Played(playable, task, self.temperature, max_message_tokens=tokens, purpose=f"{self.purpose}/{purpose}")

    def _conclude(self, best: list[_State], items: Sequence[Item], groups: Sequence[int], k: int) -> list[Episode]:
        """The answer, scored like any other: the item as it is, but for the steps before the question's end."""
        asked = [
            replace(item, prompt=CONCLUSION.format(problem=item.prompt, so_far=_so_far(best[place * k + sample])))
            for place, item in enumerate(items)
            for sample in range(k)
        ]
        numbers = [group * k + sample for group in groups for sample in range(k)]
        tokens = max(1, self.tree.conclusion_tokens // self.messages)
        episodes = self._sampled(self.solver, self.task, tokens, "answer").play(asked, numbers, 1, None)
        for place, episode in enumerate(episodes):
            episode.group = groups[place // k]
            episode.item = items[place // k]  # what is compared and counted by category is the item itself
        return episodes


def _so_far(state: _State) -> str:
    return "Steps so far:\n" + "\n".join(f"{i}. {step}" for i, step in enumerate(state.steps, 1)) + "\n\n" if state.steps else ""


def one_message(playable: PlayableTeam) -> PlayableTeam:
    """The same agent, asked once."""
    return replace(playable, team=replace(playable.team, router=build_router("round_robin", playable.team.names[:1])))


def answers_once(task: Task) -> bool:
    """Whether an episode is a question and an answer, with no environment that talks back."""
    return type(task).open is Task.open
