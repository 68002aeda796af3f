"""Plays episodes: each moves to its next speaker as soon as its own message is done, with no barrier per turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from teamtr_lora.errors import UserError
from teamtr_lora.rollout.sampler import Completion, Request, Sampler, SamplingParams, derive_seed
from teamtr_lora.tasks.task import Interaction, Item, Task
from teamtr_lora.team import Episode, Message, Team, Transcript


@dataclass(frozen=True)
class PlayPlan:
    """What to play: every item `episodes_per_item` times. `purpose` keeps the seeds of different rollouts apart."""

    items: Sequence[Item]
    episodes_per_item: int
    temperature: float
    max_message_tokens: int
    purpose: str


@dataclass
class _Player:
    episode: Episode
    transcript: Transcript
    interaction: Interaction
    agent: str = ""
    prompt_ids: list[int] | None = None


Progress = Callable[[int, int, int], None]  # episodes done, episodes in all, tokens sampled so far


def play(
    team: Team,
    task: Task,
    sampler: Sampler,
    plan: PlayPlan,
    versions: Mapping[str, str],
    progress: Progress | None = None,
) -> list[Episode]:
    """Finished, scored episodes in the order of the plan. A completion of any version not in `versions` is refused."""
    players = [
        _seat(team, task, plan, group, index) for group in range(len(plan.items)) for index in range(plan.episodes_per_item)
    ]
    waiting: dict[int, _Player] = {}
    done = tokens = 0
    for player in players:
        done += _submit_next(team, sampler, plan, player, waiting)
    while waiting:
        completions = sampler.poll()
        if not completions:
            raise RuntimeError(f"the sampler lost {len(waiting)} requests")
        for completion in completions:
            if completion.ticket not in waiting:  # left in the sampler by a rollout that failed
                continue
            player = waiting.pop(completion.ticket)
            _take(team, player, completion, versions)
            tokens += len(completion.token_ids)
            done += _submit_next(team, sampler, plan, player, waiting)
        if progress:
            progress(done, len(players), tokens)
    episodes = [player.episode for player in players]
    _settle(task, episodes)
    return episodes


def _seat(team: Team, task: Task, plan: PlayPlan, group: int, index: int) -> _Player:
    item = plan.items[group]
    interaction = task.open(item)
    prompt = interaction.first()
    seed = derive_seed(plan.purpose, group, item.id, index)
    episode = Episode(item_id=item.id, group=group, prompt=prompt, seed=seed, item=item)
    return _Player(episode, team.protocol.begin(prompt), interaction)


def _submit_next(team: Team, sampler: Sampler, plan: PlayPlan, player: _Player, waiting: dict[int, _Player]) -> bool:
    """Asks the next speaker for a message; True when the episode is over instead."""
    episode = player.episode
    agent = None if episode.ended == "task" else team.router.next(episode.messages)
    if agent is None:
        return True
    prompt = player.transcript.prompt_for(agent)
    room = team.context_tokens - len(prompt)
    if room < 1:
        return _overflow(team, episode, len(prompt))
    turn = len(episode.messages)
    params = SamplingParams(plan.temperature, min(plan.max_message_tokens, room), tuple(team.protocol.end_ids))
    player.agent, player.prompt_ids = agent, prompt
    waiting[sampler.submit(Request(prompt, agent, params, derive_seed(episode.seed, turn)))] = player
    return False


def _overflow(team: Team, episode: Episode, tokens: int) -> bool:
    if not episode.messages or team.on_overflow == "error":
        what = "prompt" if not episode.messages else "transcript"
        raise UserError(
            f"item {episode.item_id!r}: its {what} is {tokens} tokens, longer than the context of {team.context_tokens}; "
            "shorten it, or raise team.protocol.context_tokens if the base allows more"
        )
    episode.ended = "overflow"
    return True


def _take(team: Team, player: _Player, completion: Completion, versions: Mapping[str, str]) -> None:
    episode = player.episode
    if completion.error:
        raise UserError(f"item {episode.item_id!r}, agent {player.agent!r}: {completion.error}")
    if completion.version != versions[player.agent]:
        raise RuntimeError(
            f"{player.agent}: a message came from superseded version {completion.version}, not {versions[player.agent]}"
        )
    text = player.transcript.add_message(player.agent, completion.token_ids)
    message = Message(
        agent=player.agent,
        turn=len(episode.messages),
        prompt_ids=player.prompt_ids or [],
        token_ids=completion.token_ids,
        sampler_logprobs=completion.logprobs,
        version=completion.version,
        finish=completion.finish,
        text=text,
    )
    feedback = player.interaction.feed(message)
    episode.messages.append(message)
    episode.rewards.append(feedback.reward)
    episode.feedback.append(feedback.text)
    if feedback.done:
        episode.ended = "task"
    elif feedback.text is not None:
        player.transcript.add_feedback(feedback.text)


def _settle(task: Task, episodes: list[Episode]) -> None:
    """Adds the terminal rewards, all in one call."""
    for episode, reward in zip(episodes, task.score(episodes), strict=True):
        if episode.rewards:
            episode.rewards[-1] += reward
        else:
            episode.rewards.append(reward)
        episode.success = task.success(episode.reward)
