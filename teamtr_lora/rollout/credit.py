"""Credit by agent where the task gives none: for its own answer, and beside all that the others said."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from teamtr_lora.tasks.machinery.task import Task
from teamtr_lora.team import Episode, Message, Team

Worth = Mapping[tuple[int, str], float]  # what stands in place of the team's reward, by episode and agent


def credit_agents(task: Task, team: Team, episodes: Sequence[Episode], rewards: Sequence[float]) -> None:
    """Writes into each episode what its agents learn from: the team's rewards, with the terminal one (`rewards`) replaced by what
    the agent's own last message would have got as the team's answer, as far as `team.own_answer_share` goes, and for the rest,
    with `team.recombine`, by what it got beside the others' messages of the whole group."""
    share, rewards = team.own_answer_share, [float(reward) for reward in rewards]
    own = own_answers(task, episodes) if share else {}
    beside = beside_others(task, team, episodes, rewards) if team.recombine else {}
    for at, (episode, reward) in enumerate(zip(episodes, rewards, strict=True)):
        *earlier, last = episode.rewards
        for agent in team.names:
            answered, heard = own.get((at, agent), reward), beside.get((at, agent), reward)
            episode.credit[agent] = [*earlier, last - reward + share * answered + (1 - share) * heard]


def own_answers(task: Task, episodes: Sequence[Episode]) -> Worth:
    """The score of each agent's last message as the team's answer, all in one call. Those that are it are not scored again."""
    last = [{message.agent: message.turn for message in episode.messages} for episode in episodes]
    asked = [(at, agent) for at, turns in enumerate(last) for agent in turns if turns[agent] != episodes[at].answer_turn]
    scores = task.score([replace(episodes[at], answer_turn=last[at][agent]).as_answered() for at, agent in asked])
    return dict(zip(asked, map(float, scores), strict=True))


def beside_others(task: Task, team: Team, episodes: Sequence[Episode], rewards: Sequence[float]) -> Worth:
    """Each message's mean reward over what the others said in every episode of its group.

    In one blind round nobody hears the message, so what the others said in any episode is as likely beside it as what they said
    in its own: the expected gradient stays the same, and the luck of whom it met goes out of it. Episodes in which somebody did
    not speak keep their reward. Where one message is the team's answer, its score is the same whatever the others said.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for at, episode in enumerate(episodes):
        if len(episode.messages) == len(team.router.blind_round):
            groups[episode.group].append(at)
    votes: dict[int, str | None] = {}  # by message: reading an answer may take longer than all else here

    def vote(alone: Episode) -> str | None:
        key = id(alone.messages[0])
        return votes[key] if key in votes else votes.setdefault(key, task.vote(alone))

    remade: dict[tuple[int, ...], Episode] = {}  # by the messages that the score is made of
    met: list[tuple[int, str, tuple[int, ...]]] = []
    for members in groups.values():
        for turn, agent in enumerate(team.router.blind_round):
            for at, other in permutations(members, 2):
                messages = [*episodes[other].messages]
                messages[turn] = episodes[at].messages[turn]
                episode = replace(episodes[at], messages=messages, answer_turn=None)
                episode.answer_turn = team.answer_turn(episode, vote)
                key = _scored(team, episode)
                remade.setdefault(key, episode)
                met.append((at, agent, key))
    known = {_scored(team, episode): reward for episode, reward in zip(episodes, rewards, strict=True) if episode.messages}
    new = [key for key in remade if key not in known]
    known |= zip(new, map(float, task.score([remade[key].as_answered() for key in new])), strict=True)
    got: dict[tuple[int, str], list[float]] = defaultdict(list)
    for at, agent, key in met:
        got[at, agent].append(known[key])
    # summed exactly: messages that are worth the same differ by nothing, in whatever order they met the others
    return {(at, agent): math.fsum([*values, rewards[at]]) / (1 + len(values)) for (at, agent), values in got.items()}


def _scored(team: Team, episode: Episode) -> tuple[int, ...]:
    """The messages that a score is made of."""
    answer: list[Message] = episode.messages
    if team.router.one_answer and episode.answer_turn is not None:
        answer = [episode.messages[episode.answer_turn]]
    return tuple(map(id, answer))
