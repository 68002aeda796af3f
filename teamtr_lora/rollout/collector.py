"""Plays episodes: each moves to its next speaker as soon as its own message is done, with no barrier per turn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch

from teamtr_lora.common.code_paths import raised, user_code
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import meant
from teamtr_lora.recipe import RolloutSection
from teamtr_lora.rollout.credit import credit_agents, number, scored
from teamtr_lora.rollout.patience import waiting_for
from teamtr_lora.rollout.sampler import Completion, Request, Sampler, SamplingParams, derive_seed
from teamtr_lora.tasks.machinery.background import as_future
from teamtr_lora.tasks.machinery.task import Feedback, Interaction, Item, Task, note_rewards, settled
from teamtr_lora.team import Episode, Message, Team, Transcript

GATHER_SECONDS = 0.1


@dataclass(frozen=True)
class PlayPlan:
    """What to play: every item `episodes_per_item` times. `purpose` keeps the seeds of different rollouts apart."""

    items: Sequence[Item]
    episodes_per_item: int
    temperature: float
    max_message_tokens: int
    purpose: str
    groups: Sequence[int] | None = None  # the items' numbers where they are a part of a longer list; seeds depend on them
    learned_from: bool = True  # credit by agent is of use

    @classmethod
    def of(cls, rollout: RolloutSection, items: Sequence[Item], purpose: str, episodes_per_item: int | None = None) -> PlayPlan:
        """As the recipe samples to learn from; `episodes_per_item`: other than there."""
        return cls(
            items,
            episodes_per_item=episodes_per_item or rollout.episodes_per_item,
            temperature=rollout.temperature,
            max_message_tokens=rollout.max_message_tokens,
            purpose=purpose,
        )

    def group(self, place: int) -> int:
        return place if self.groups is None else self.groups[place]


@dataclass
class _Asked:
    """A message that an agent was asked for."""

    agent: str
    prompt_ids: list[int]
    completion: Completion | None = None


@dataclass
class _Player:
    episode: Episode
    transcript: Transcript
    interaction: Interaction
    asked: dict[int, _Asked] = field(default_factory=dict)  # by the sampler's ticket, in the order of their turns
    credit: list[dict[str, float] | None] = field(default_factory=list)  # by message, as the environment gave it


Progress = Callable[[int, int, int], None]  # episodes done, episodes in all, tokens sampled so far


def play(
    team: Team, task: Task, sampler: Sampler, plan: PlayPlan, versions: Mapping[str, str], progress: Progress | None = None
) -> list[Episode]:
    """Finished, scored episodes in the order of the plan. A completion of any version not in `versions` is refused."""
    task.check_playable()
    with _generators(derive_seed(plan.purpose, plan.groups)):
        return _play(team, task, sampler, plan, versions, progress)


@contextmanager
def _generators(seed: int) -> Iterator[None]:
    """Rewards, routers and responders may draw from the process's generators. The same plan finds them in the same state whenever
    it is played, so that a resumed run can play a rollout again; afterwards they are as they were."""
    python, array, tensor = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # not those of GPUs: nothing of ours draws from them, and asking costs a wait
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(tensor)


def _play(
    team: Team, task: Task, sampler: Sampler, plan: PlayPlan, versions: Mapping[str, str], progress: Progress | None
) -> list[Episode]:
    players = _seated(team, task, plan)
    if team.recombine and plan.learned_from and any(map(_answers_back, players)):
        raise UserError(
            f"team.recombine: {task.name or 'this task'} answers messages, and what it would have said to other ones is not "
            "known; leave it out"
        )
    waiting: dict[int, _Player] = {}  # for a message, by the sampler's ticket
    answering: dict[Future[Feedback], _Player] = {}  # for the environment's answer to one
    done = tokens = 0
    for player in players:
        done += _submit_next(team, sampler, plan, player, waiting)
    try:
        while waiting or answering:
            for player in _answered(team, answering, until_one=not waiting):
                done += _submit_next(team, sampler, plan, player, waiting)
            completions = sampler.poll() if waiting else []
            if waiting and not completions:
                raise RuntimeError(f"the sampler lost {len(waiting)} requests")
            for completion in completions:
                if completion.ticket not in waiting:  # left in the sampler by a rollout that failed
                    continue
                player = waiting.pop(completion.ticket)
                player.asked[completion.ticket].completion = completion
                tokens += len(completion.token_ids)
                for feedback in _said(player, versions):
                    if isinstance(feedback, Future):
                        answering[feedback] = player
                    else:
                        _hear(team, player, feedback)
                        done += not player.asked and _submit_next(team, sampler, plan, player, waiting)
            if progress:
                progress(done, len(players), tokens)
    finally:
        for answer in answering:
            answer.cancel()
    _settle(team, task, players, credited=plan.learned_from)
    return [player.episode for player in players]


def _seated(team: Team, task: Task, plan: PlayPlan) -> list[_Player]:
    seats = [(place, index) for place in range(len(plan.items)) for index in range(plan.episodes_per_item)]
    interactions, openings = [], []  # all are asked for before any is waited for
    for place, _ in seats:
        with _of_the_task(task, plan.items[place].id):
            interactions.append(task.open(plan.items[place]))
            openings.append(as_future(interactions[-1].first()))
    try:
        players = []
        for (place, index), interaction, opening in zip(seats, interactions, openings, strict=True):
            with _of_the_task(task, plan.items[place].id):
                prompt = settled(opening)
            if not isinstance(prompt, str):
                raise _returned(plan.items[place].id, f"{type(interaction).__name__}.first", prompt, "a text")
            item, group = plan.items[place], plan.group(place)
            seed = derive_seed(plan.purpose, group, item.id, index)
            episode = Episode(item_id=item.id, group=group, prompt=_writable(prompt), seed=seed, item=item)
            players.append(_Player(episode, team.protocol.begin(prompt), interaction))
        return players
    finally:
        for opening in openings:
            if isinstance(opening, Future):
                opening.cancel()  # of no use, unless one of them failed


def _submit_next(team: Team, sampler: Sampler, plan: PlayPlan, player: _Player, waiting: dict[int, _Player]) -> bool:
    """Asks the next speaker for a message, or a blind round's all at once; True when the episode is over instead."""
    episode = player.episode
    requests = next_requests(team, player.transcript, episode, plan.temperature, plan.max_message_tokens)
    for request in islice(requests, 1) if _answers_back(player) else requests:  # what it says comes before the next message
        if len(request.prompt_ids) >= team.context_tokens:
            return not player.asked and _overflow(team, episode, len(request.prompt_ids))
        ticket = sampler.submit(request)
        waiting[ticket], player.asked[ticket] = player, _Asked(request.agent, request.prompt_ids)
    return not player.asked


def next_requests(team: Team, transcript: Transcript, episode: Episode, temperature: float, most: int) -> Iterator[Request]:
    """The next speaker's, or those of a blind round; none where the episode is over. A prompt may fill the context, and leave no
    room for a message. `most`: tokens of one."""
    speakers = [] if episode.ended == "task" else team.router.together(episode.messages)
    for turn, agent in enumerate(speakers, len(episode.messages)):
        prompt = transcript.prompt_for(agent)
        params = SamplingParams(temperature, min(most, team.context_tokens - len(prompt)), tuple(team.protocol.end_ids))
        yield Request(prompt, agent, params, seed=derive_seed(episode.seed, turn), episode=episode.seed)


def _answers_back(player: _Player) -> bool:
    return getattr(player.interaction.feed, "__func__", None) is not Interaction.feed


def _overflow(team: Team, episode: Episode, tokens: int) -> bool:
    if not episode.messages or team.on_overflow == "error":
        what = "prompt" if not episode.messages else "transcript"
        raise UserError(
            f"item {episode.item_id!r}: its {what} is {tokens} tokens, longer than the context of {team.context_tokens}; "
            "shorten it, or raise team.protocol.context_tokens if the base allows more"
        )
    episode.ended = "overflow"
    return True


def _answered(team: Team, answering: dict[Future[Feedback], _Player], *, until_one: bool) -> list[_Player]:
    """The players whose environments have answered by now; `until_one` waits for the first of them, and a moment for more: an
    engine that works in batches would otherwise start with one request."""
    if until_one:
        slowest = next(iter(answering.values()))
        with waiting_for(slowest.interaction, slowest.episode.item_id):
            wait(answering, return_when=FIRST_COMPLETED)
        wait(answering, timeout=GATHER_SECONDS)
    ready = [answer for answer in answering if answer.done()]
    players = [answering.pop(answer) for answer in ready]
    for player, answer in zip(players, ready, strict=True):
        _hear(team, player, answer)
    return players


def _said(player: _Player, versions: Mapping[str, str]) -> Iterator[Feedback | Future[Feedback]]:
    """Adds the messages that have come to their episode, in the order of their turns. Yields what the environment says to each,
    or will say."""
    while player.asked:
        ticket, asked = next(iter(player.asked.items()))
        if asked.completion is None:
            return
        del player.asked[ticket]
        yield _take(player, asked, asked.completion, versions)


def _take(player: _Player, asked: _Asked, completion: Completion, versions: Mapping[str, str]) -> Feedback | Future[Feedback]:
    episode, agent = player.episode, asked.agent
    if completion.error:
        raise UserError(f"item {episode.item_id!r}, agent {agent!r}: {completion.error}")
    if completion.version != versions[agent]:
        raise RuntimeError(f"{agent}: a message came from superseded version {completion.version}, not {versions[agent]}")
    text = player.transcript.add_message(agent, completion.token_ids)
    message = Message(
        agent=agent,
        turn=len(episode.messages),
        prompt_ids=asked.prompt_ids,
        token_ids=completion.token_ids,
        sampler_logprobs=completion.logprobs,
        version=completion.version,
        finish=completion.finish,
        text=text,
    )
    with _of_the_task(player.interaction, episode.item_id):
        feedback: Feedback | Future[Feedback] = as_future(player.interaction.feed(message))
    episode.messages.append(message)
    return feedback


def _writable(text: str) -> str:
    """As the protocol encodes it: half of a surrogate pair, which neither tokens nor files can hold, is a question mark."""
    return text.encode("utf-8", "replace").decode()


@contextmanager
def _of_the_task(who: object, item: str) -> Iterator[None]:
    """Wraps calls into an environment, which may be the user's code: errors become one line, and a long wait is told."""
    try:
        with user_code(), waiting_for(who, item):
            yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"item {item!r}: {type(who).__name__} {raised(error)}") from error


def _hear(team: Team, player: _Player, answer: Feedback | Future[Feedback]) -> None:
    episode = player.episode
    with _of_the_task(player.interaction, episode.item_id):
        feedback = settled(answer)
    if not isinstance(feedback, Feedback) or not isinstance(feedback.text, str | None):
        where = f"{type(player.interaction).__name__}.feed"
        raise _returned(episode.item_id, where, feedback, "a Feedback with a text or None")
    player.credit.append(_credit(team, episode, feedback.credit))
    episode.rewards.append(number(episode, "reward", feedback.reward))
    episode.feedback.append(None if feedback.text is None else _writable(feedback.text))
    if feedback.done:
        episode.ended = "task"
    elif feedback.text is not None:
        player.transcript.add_feedback(feedback.text)


def _returned(item: str, where: str, value: Any, wanted: str) -> UserError:
    return UserError(f"item {item!r}: {where} returned {value!r:.60}; it must return {wanted}, or a future or coroutine of one")


def _credit(team: Team, episode: Episode, credit: Mapping[str, float] | None) -> dict[str, float] | None:
    """A task's credit by agent, checked."""
    if not isinstance(credit, Mapping | None):
        raise UserError(
            f"item {episode.item_id!r}: the task gave a credit of {credit!r:.60}; it must be numbers by agent, or None"
        )
    for agent in credit or ():
        if agent not in team.names:
            fix = meant(str(agent), team.names)
            raise UserError(f"item {episode.item_id!r}: the task gave credit to {agent!r}, who is no agent of the team; {fix}")
    return None if credit is None else {agent: number(episode, f"credit for {agent}", n) for agent, n in credit.items()}


def _settle(team: Team, task: Task, players: list[_Player], *, credited: bool) -> None:
    """Adds terminal rewards and credit for the answers that the router chooses, scoring all episodes in one call."""
    episodes = [player.episode for player in players]
    for episode in episodes:
        episode.answer_turn = team.answer_turn(episode, task.vote)
    with _of_the_task(task, episodes[0].item_id if episodes else ""):
        rewards, credits = scored(task, episodes), list(task.credit(episodes))
    if len(credits) != len(episodes):
        raise UserError(f"{type(task).__name__}.credit returned {len(credits)} values for {len(episodes)} episodes")
    for player, reward, credit in zip(players, rewards, credits, strict=True):
        episode = player.episode
        if episode.rewards:
            episode.rewards[-1] += reward
        else:
            episode.rewards.append(reward)
        player.credit.append(_credit(team, episode, credit))
        with _of_the_task(task, episode.item_id):
            episode.success = bool(task.success(episode.reward))
    note_rewards(task, episodes)
    if any(credit is not None for player in players for credit in player.credit):
        for player in players:
            player.episode.credit = {agent: _earned(player, agent) for agent in team.names}
    elif credited and (team.own_answer_share or team.recombine):
        with _of_the_task(task, episodes[0].item_id if episodes else ""):
            credit_agents(task, team, episodes, rewards)


def _earned(player: _Player, agent: str) -> list[float]:
    """What an agent earned by each message; what came at the end is in the last entry, as in the team's rewards."""
    *by_message, last = [(credit or {}).get(agent, 0.0) for credit in player.credit]
    if not by_message:
        return [last]
    by_message[-1] += last
    return by_message
