"""The probe: contexts from the pre-swap team's own episodes in which an agent speaks, with what it said (nu of app:align)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe
from teamtr_lora.rollout.collector import PlayPlan, Progress
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.rollout.sampler import derive_seed
from teamtr_lora.tasks import DataOrder, Task
from teamtr_lora.team import Episode, SequenceSpan, TokenSequence

# Episodes played for each context wanted, before an agent counts as one that hardly ever speaks.
MOST_EPISODES_PER_CONTEXT = 8
SURELY = 64  # after this many episodes in which an agent never speaks, no more are played for it


@dataclass(frozen=True)
class Probe:
    episodes: list[Episode]

    @property
    def sampled_tokens(self) -> int:
        return sum(episode.tokens for episode in self.episodes)

    def halves(self, agent: str, contexts: int, seed: int) -> tuple[list[TokenSequence], list[TokenSequence]]:
        """`agent`'s first `contexts` contexts with what it said, to learn from and held out; an item is on one side."""
        sequences = _contexts(self.episodes, agent)[:contexts]
        items = sorted({s.episode.item_id for s in sequences})
        random.Random(derive_seed(seed, "probe", agent)).shuffle(items)
        fit = set(items[: len(items) // 2])
        held = set(items) - fit
        if not fit or len(held) < 2:
            raise UserError(
                f"agent {agent!r}: its probe comes from {len(items)} different items, too few to hold half of them out; "
                "use more --probe-contexts or a task with more items"
            )
        return [s for s in sequences if s.episode.item_id in fit], [s for s in sequences if s.episode.item_id in held]


def play_probe(
    playable: PlayableTeam,
    task: Task,
    recipe: Recipe,
    agents: Sequence[str],
    contexts: int,
    progress: Progress | None = None,
    *,
    ids: int | None = None,
) -> Probe:
    """Plays the team as it is on training items, one episode an item, until each of `agents` has spoken `contexts` times.

    Episodes with a token id that is not below `ids` are left out: who reads them has no such token.
    """
    order = DataOrder(task.items("train"), derive_seed(recipe.seed, "probe") % 2**31)
    rollout, router = recipe.rollout, playable.team.router
    episodes: list[Episode] = []
    groups: dict[str, int] = {}
    tried = 0
    share = max(1.0, router.max_messages / len(playable.team.names))  # messages that an agent is likely to have in an episode
    while (missing := contexts - min(_spoken(episodes, agent) for agent in agents)) > 0:
        silent = min(agents, key=lambda agent: _spoken(episodes, agent))
        never = tried >= SURELY and not _spoken(episodes, silent)
        if never or tried >= MOST_EPISODES_PER_CONTEXT * contexts:
            usable = "" if ids is None else f" of which {len(episodes)} use only ids that both bases have"
            raise UserError(
                f"agent {silent!r} spoke {_spoken(episodes, silent)} times in {tried} episodes{usable}, {contexts} contexts are "
                "wanted; use fewer --probe-contexts, or check that the router lets it speak"
            )
        count = max(8, math.ceil(missing / share))
        plan = PlayPlan.of(rollout, order.take(tried, count), f"{recipe.seed}/probe/{tried}", 1)
        played = playable.play(task, plan, progress)
        tried += len(played)
        if ids is not None:
            played = [e for e in played if all(max(m.prompt_ids + m.token_ids) < ids for m in e.messages)]
        for episode in played:  # an item met again in a later batch is still one cluster
            episode.group = groups.setdefault(episode.item_id, len(groups))
        episodes += played
    return Probe(episodes)


def _spoken(episodes: list[Episode], agent: str) -> int:
    return sum(m.agent == agent and bool(m.token_ids) for e in episodes for m in e.messages)


def _contexts(episodes: Sequence[Episode], agent: str) -> list[TokenSequence]:
    """One sequence a message, so that another rendering of the same episodes gives the same list."""
    return [
        TokenSequence(m.prompt_ids + m.token_ids, [SequenceSpan(len(m.prompt_ids), len(m.prompt_ids) + len(m.token_ids), m)], e)
        for e in episodes
        for m in e.messages
        if m.agent == agent and m.token_ids
    ]


def context_strings(probe: Probe, tokenizer: Any, wanted: int) -> list[str]:
    """At least `wanted` different strings of the team's contexts, where there are that many: whole contexts, messages, and then
    pieces of contexts, cut at each of their lines."""
    contexts = [tokenizer.decode(m.prompt_ids + m.token_ids) for e in probe.episodes for m in e.messages]
    strings = dict.fromkeys(
        [*contexts, *(m.text for e in probe.episodes for m in e.messages), *(e.prompt for e in probe.episodes)]
    )
    for context in contexts:
        if len(strings) >= wanted:
            break
        lines = context.splitlines(keepends=True)
        strings |= dict.fromkeys("".join(lines[start:]) for start in range(1, len(lines)))
        strings |= dict.fromkeys("".join(lines[:end]) for end in range(1, len(lines)))
        strings |= dict.fromkeys(context[start:] for start in range(1, len(context)))
    strings.pop("", None)
    return list(strings)


def replayed(episodes: Sequence[Episode], protocol: Any) -> list[Episode]:
    """The same conversations as another team's protocol renders them: sampled tokens stay, the contexts around them are anew."""
    return [_replay(episode, protocol) for episode in episodes]


def _replay(episode: Episode, protocol: Any) -> Episode:
    transcript = protocol.begin(episode.prompt)
    messages = []
    for number, message in enumerate(episode.messages):
        prompt = transcript.prompt_for(message.agent)
        text = transcript.add_message(message.agent, message.token_ids)
        messages.append(replace(message, prompt_ids=prompt, text=text))
        feedback = episode.feedback[number]
        if feedback is not None and number + 1 < len(episode.messages):
            transcript.add_feedback(feedback)
    return Episode(episode.item_id, episode.group, episode.prompt, episode.seed, item=episode.item, messages=messages)


def probe_record(probe: Probe) -> dict[str, Any]:
    """The probe as JSON, so that an interrupted swap goes on with the same one. The items themselves are not needed again."""
    return {"episodes": [asdict(replace(episode, item=None)) for episode in probe.episodes]}


def probe_from(record: dict[str, Any]) -> Probe:
    """What `probe_record` made."""
    return Probe(TypeAdapter(list[Episode]).validate_python(record["episodes"]))
