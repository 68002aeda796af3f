"""What to say of a stage that taught nothing: every update was skipped."""

from __future__ import annotations

import json
from collections.abc import Sequence

from teamtr_lora.common.visible import json_escaped
from teamtr_lora.recipe import Recipe, ScriptSettings, TeamTRConfig
from teamtr_lora.team import Episode

SHOWN = 300  # characters of a prompt or message


def idle_warning(episodes: Sequence[Episode], config: TeamTRConfig, *, stage: int, idle: int, stops: bool) -> str:
    """`episodes`: the stage's last rollout; `idle`: stages in a row that taught nothing, this one included."""
    low, high = min(episodes, key=lambda e: e.reward), max(episodes, key=lambda e: e.reward)
    if high is low:
        high = episodes[-1]
    lines = [f"stage {stage} taught nothing: every update was skipped. {_cause(episodes, low, high)} {_advice(episodes, config)}"]
    for episode in (low, high):
        said = " | ".join(f"{m.agent}: {_short(m.text)}" for m in episode.messages) or "(nobody spoke)"
        lines.append(f"  item {_short(episode.item_id)}, reward {episode.reward:g}: {_short(episode.prompt)} -> {said}")
    if stops:
        key = config.written("training.stop_after_idle_stages")
        lines.append(f"the run stops here, after {idle} such stage{'s' * (idle > 1)} in a row ({key} = {idle}; 0 never stops)")
    return "\n".join(lines)


def _cause(episodes: Sequence[Episode], low: Episode, high: Episode) -> str:
    if not any(episode.messages for episode in episodes):
        return "No agent said anything."
    if low.reward == high.reward:
        return f"The reward never varies: all {len(episodes)} episodes earned {low.reward:g}."
    return f"Rewards are between {low.reward:g} and {high.reward:g}, but too few items have both better and worse episodes."


def _advice(episodes: Sequence[Episode], config: TeamTRConfig) -> str:
    messages = [message for episode in episodes for message in episode.messages]
    cut = sum(message.truncated for message in messages)
    reward = config.written("task.reward") if _has_reward(config) else "what the task rewards"
    steps = [f"check {reward} on the two episodes below"]
    if 2 * cut > len(messages):
        limit = config.written("rollout.max_message_tokens")
        steps.append(f"raise {limit} (now {config.rollout.max_message_tokens}: {cut} of {len(messages)} messages were cut off)")
    steps.append(
        f"raise {config.written('rollout.temperature')} or {config.written('rollout.episodes_per_item')}, so that tries differ"
    )
    succeeded = 2 * sum(episode.success for episode in episodes) > len(episodes)
    steps.append(f"or give the team {'harder' if succeeded else 'easier'} items")
    return f"What to change: {'; '.join(steps)}."


def _has_reward(config: TeamTRConfig) -> bool:
    """Whether there is such a key, or argument of a script, to look at."""
    task = config.task if isinstance(config, Recipe) else None
    return task is None or isinstance(task, ScriptSettings) or "reward" in type(task).model_fields


def _short(text: str) -> str:
    """On one line, as JSON writes it, and readable in any language: what a model writes may hold anything."""
    return json_escaped(json.dumps(text if len(text) <= SHOWN else f"{text[:SHOWN]}...", ensure_ascii=False))
