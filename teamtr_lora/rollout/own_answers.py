"""Credit by agent where the task gives none: what an agent's own last message would have got as the team's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from teamtr_lora.tasks.machinery.task import Task
from teamtr_lora.team import Episode


def credit_own_answers(
    task: Task, episodes: Sequence[Episode], rewards: Sequence[float], agents: Sequence[str], share: float
) -> None:
    """Writes into each episode what its agents learn from: the team's rewards, with `share` of the terminal one (`rewards`)
    replaced by the score of the agent's own last message. An agent that did not speak learns from the team's alone. Messages that
    are the team's answer are not scored again; all others are, in one call."""
    turns = [{message.agent: message.turn for message in episode.messages} for episode in episodes]  # of last messages
    asked = [(at, turn) for at, own in enumerate(turns) for turn in own.values() if turn != episodes[at].answer_turn]
    scores = task.score([replace(episodes[at], answer_turn=turn).as_answered() for at, turn in asked])
    own_score = dict(zip(asked, map(float, scores), strict=True))
    for at, (episode, reward) in enumerate(zip(episodes, rewards, strict=True)):
        *earlier, last = episode.rewards
        for agent in agents:
            instead = own_score.get((at, turns[at].get(agent, -1)), reward)
            episode.credit[agent] = [*earlier, last + share * (instead - reward)]
