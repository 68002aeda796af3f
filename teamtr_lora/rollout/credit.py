"""Credit by agent where the task gives none: for its own answer, and beside all that the others said."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.machinery.task import Task
from teamtr_lora.team import Episode, Message, Team

MOST_OTHERS = 15  # episodes that a message is put into: the noise left by more of them is a small part of all

Worth = Mapping[tuple[int, str], float]  # what stands in place of the team's reward, by episode and agent
Met = Mapping[tuple[int, str], list[float]]  # the values that it is a mean of


def scored(task: Task, episodes: Sequence[Episode]) -> list[float]:
    """A task's rewards, checked; it is not asked about nothing."""
    values = list(task.score(episodes)) if episodes else []
    if len(values) != len(episodes):
        raise UserError(f"{type(task).__name__}.score returned {len(values)} values for {len(episodes)} episodes")
    return [number(episode, "reward", value) for episode, value in zip(episodes, values, strict=True)]


def number(episode: Episode, what: str, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise UserError(f"item {episode.item_id!r}: the task gave a {what} of {value!r}; it must be a finite number")
    return found


def credit_agents(task: Task, team: Team, episodes: Sequence[Episode], rewards: Sequence[float]) -> None:
    """Writes into each episode what its agents learn from: the team's rewards, with the terminal one (`rewards`) replaced by what
    the agent's own last message would have got as the team's answer, as far as `team.own_answer_share` goes, and for the rest,
    with `team.recombine`, by what it got beside the others' messages of the whole group."""
    share = team.own_answer_share
    own = own_answers(task, episodes) if share else {}
    beside = beside_others(task, team, episodes, rewards) if team.recombine and share < 1 else {}
    for at, (episode, reward) in enumerate(zip(episodes, rewards, strict=True)):
        *earlier, last = episode.rewards
        for agent in team.names:
            met = beside.get((at, agent), [reward])
            heard = math.fsum(met) / len(met)  # exact: whatever order they met the others in, equal messages are worth the same
            episode.credit[agent] = [*earlier, last - reward + share * own.get((at, agent), reward) + (1 - share) * heard]
            if (at, agent) in beside:
                episode.beside[agent] = [(1 - share) * value for value in met]


def own_answers(task: Task, episodes: Sequence[Episode]) -> Worth:
    """The score of each agent's last message as the team's answer, all in one call. Those that are it are not scored again."""
    last = [{message.agent: message.turn for message in episode.messages} for episode in episodes]
    asked = [(at, agent) for at, turns in enumerate(last) for agent in turns if turns[agent] != episodes[at].answer_turn]
    answered = [replace(episodes[at], answer_turn=last[at][agent]) for at, agent in asked]
    return dict(zip(asked, scored(task, answered), strict=True))


def beside_others(task: Task, team: Team, episodes: Sequence[Episode], rewards: Sequence[float]) -> Met:
    """Each message's rewards beside what the others said in its own and every other episode of its group.

    In one blind round nobody hears the message, so what the others said in any episode is as likely beside it as what they said
    in its own: its expected return stays the same, and the luck of whom it met goes out of it. Episodes in which somebody did
    not speak, or that began otherwise than the rest, keep their reward.
    """
    votes: dict[int, str | None] = {}  # by message: reading an answer may take longer than all else here

    def vote(episode: Episode, message: Message) -> str | None:
        if id(message) not in votes:
            votes[id(message)] = task.vote(replace(episode, messages=[message], answer_turn=None))
        return votes[id(message)]

    def counted(messages: Sequence[Message], answer_turn: int | None) -> tuple[int, ...]:
        """The messages that the score is made of."""
        if task.scores_the_answer_alone and answer_turn is not None:
            return (id(messages[answer_turn]),)
        return tuple(map(id, messages))

    remade: dict[tuple[int, ...], Episode] = {}
    met: dict[tuple[int, str], list[tuple[int, ...]]] = defaultdict(list)
    for at, other in _pairs(team, episodes):
        for turn, agent in enumerate(team.router.blind_round):
            messages = [*episodes[other].messages]
            messages[turn] = episodes[at].messages[turn]
            answer_turn = team.router.answer_turn(messages, partial(vote, episodes[at]))
            key = counted(messages, answer_turn)
            if key not in remade:
                nothing = [0.0] * len(messages)
                remade[key] = replace(
                    episodes[at], messages=messages, rewards=nothing, success=False, credit={}, answer_turn=answer_turn
                )
            met[at, agent].append(key)
    known = {counted(e.messages, e.answer_turn): reward for e, reward in zip(episodes, rewards, strict=True)}
    new = [key for key in remade if key not in known]
    known |= zip(new, scored(task, [remade[key] for key in new]), strict=True)
    return {place: [rewards[place[0]], *(known[key] for key in keys)] for place, keys in met.items()}


def recredited(episodes: Sequence[Episode], agent: str, weight_E: np.ndarray) -> list[Episode]:
    """The same episodes, with what `agent` earns beside the others of today: together they are `weight_E` times as likely to say
    what was said in each episode as those who said it.

    A message's worth is a mean over the others' messages, weighted by them, and times the group's mean weight: summed over its
    messages a group's gradient then has the expectation that today's own has.
    """
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for at, episode in enumerate(episodes):
        if agent in episode.beside:
            groups[episode.group, episode.prompt].append(at)
    found = list(episodes)
    for members in groups.values():
        for place, at in enumerate(members):
            met, (*earlier, last) = episodes[at].beside[agent], episodes[at].credit[agent]
            beside = weight_E[_around(members, place)]
            heard = weight_E[members].mean() * math.fsum(beside * met) / math.fsum(beside)
            found[at] = replace(episodes[at], credit={agent: [*earlier, last - math.fsum(met) / len(met) + heard]})
    return found


def _pairs(team: Team, episodes: Sequence[Episode]) -> Iterator[tuple[int, int]]:
    """Each whole episode with the next ones of its group, around it."""
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for at, episode in enumerate(episodes):
        if len(episode.messages) == len(team.router.blind_round):
            groups[episode.group, episode.prompt].append(at)
    for members in groups.values():
        for place, at in enumerate(members):
            yield from ((at, other) for other in _around(members, place)[1:])


def _around(members: list[int], place: int) -> list[int]:
    """The episode at `place` of a group, and those that its messages are put into."""
    return (members[place:] + members[:place])[: MOST_OTHERS + 1]
