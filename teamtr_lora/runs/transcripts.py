"""How an episode is written down, in a run's episodes/ and in evaluations."""

from __future__ import annotations

from typing import Any

from teamtr_lora.team import Episode


def episode_record(episode: Episode, *, scored: bool = True) -> dict[str, Any]:
    """A readable transcript with token counts and adapter versions. A question that no task scored has no reward."""
    return {
        "item": episode.item_id,
        "group": episode.group,
        "prompt": episode.prompt,
        "reward": episode.reward if scored else None,
        **({"credit": {agent: sum(earned) for agent, earned in episode.credit.items()}} if scored and episode.credit else {}),
        "success": episode.success if scored else None,
        "ended": episode.ended,
        "answer_turn": episode.answer_turn,
        **({} if scored else {"answer": episode.answer}),
        "messages": [
            {
                "agent": m.agent,
                "text": m.text,
                "version": m.version,
                "prompt_tokens": len(m.prompt_ids),
                "tokens": len(m.token_ids),
                "finish": m.finish,
                "feedback": feedback,
            }
            for m, feedback in zip(episode.messages, episode.feedback, strict=True)
        ],
    }
