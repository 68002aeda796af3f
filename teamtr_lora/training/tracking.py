"""What experiment trackers are given: the settings as flat keys, a few numbers by agent, and some transcripts to read."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.flat import flat
from teamtr_lora.recipe import Recipe
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.runs.metrics import StageRow, UpdateRow
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.team import Episode

SAMPLED = 8  # episodes in a table of transcripts: the best and the worst of a rollout
COLUMNS = ["stage", "updated", "item", "reward", "prompt", "transcript"]


def open_accelerator(recipe: Recipe, playable: PlayableTeam, run_dir: RunDir) -> Accelerator:
    """accelerate's, with the recipe's trackers started."""
    tracking = recipe.tracking
    trackers = list(tracking.trackers) if playable.ranks.first else []
    named = {"name": tracking.run_name or run_dir.path.name, "group": tracking.group, "tags": list(tracking.tags) or None}
    try:
        accelerator = Accelerator(
            cpu=playable.base.device.type == "cpu",
            log_with=trackers or None,
            project_dir=str(run_dir.path),
            # Set here, or environment variables would decide. The recipe chooses precision and accumulation.
            mixed_precision="no",
            gradient_accumulation_steps=1,
        )
        if trackers:
            options = {tracker: _accepted(tracker, named) for tracker in trackers}
            accelerator.init_trackers(tracking.project, config=_settings(recipe), init_kwargs=options)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"tracking.trackers = {tracking.trackers}: cannot be started ({error}); install the tracker or leave it out"
        ) from error
    return accelerator


def _accepted(tracker: str, named: dict[str, Any]) -> dict[str, Any]:
    """What the tracker's own `init` takes of the run's name, group and tags; the rest is among the settings it shows."""
    start = getattr(importlib.import_module(tracker), "init", None)
    taken = inspect.signature(start).parameters if start else {}
    return {key: value for key, value in named.items() if key in taken and value is not None}


def _settings(recipe: Recipe) -> dict[str, Any]:
    """A recipe by its dotted keys, agents by their names; what is no number, text or switch becomes text."""
    data = recipe.model_dump(mode="json")
    data["team"]["agents"] = {agent.pop("name"): agent for agent in data["team"]["agents"]}
    return {key: value if isinstance(value, (bool, int, float, str)) else json.dumps(value) for key, value in flat(data).items()}


def update_scalars(row: UpdateRow, estimator: str) -> dict[str, float]:
    """Nine of the row's numbers, under the agent's name."""
    kl = row.kl.get(estimator)
    found = {
        "reward": row.reward_mean,
        "success_rate": row.success_rate,
        "kl": kl.mean if kl else None,
        "kl_bound": kl.bound if kl else None,
        "step_length": row.alpha or 0.0,
        "gain": row.surrogate_gain,
        "accepted": float(row.alpha is not None),
        "informative_share": 1 - row.zero_variance_groups / max(1, row.groups),
        "tokens_per_second": row.tokens_per_second if row.fresh_episodes else None,
    }
    return {f"{row.agent}/{name}": float(value) for name, value in found.items() if value is not None}


def stage_scalars(row: StageRow) -> dict[str, float]:
    """Eleven of the row's numbers, under `team`."""
    evaluation = row.evaluation or {}
    found = {
        "accuracy": evaluation.get("avg_at_k"),
        "accuracy_standard_error": evaluation.get("standard_error"),
        "mean_reward": evaluation.get("mean_reward"),
        "coordination": (evaluation.get("coordination") or {}).get("value"),
        "accepted": row.accepted,
        "shrunk": row.shrunk,
        "rejected": row.rejected,
        "skipped": row.skipped,
        "sampled_tokens": row.sampled_tokens,
        "seconds": row.seconds,
        "peak_memory_gib": row.peak_memory_bytes / 2**30,
    }
    return {f"team/{name}": float(value) for name, value in found.items() if value is not None}


def log_transcripts(accelerator: Accelerator, episodes: Sequence[Episode], *, stage: int, agent: str, step: int) -> None:
    """The best and the worst episodes as a table, where the tracker has tables; as text in TensorBoard, which has none."""
    if not accelerator.trackers or not episodes:
        return
    ranked = sorted(episodes, key=lambda episode: episode.reward, reverse=True)
    chosen = ranked if len(ranked) <= SAMPLED else ranked[: SAMPLED // 2] + ranked[-SAMPLED // 2 :]
    rows = [
        [stage, agent, e.item_id, e.reward, e.prompt, "\n\n".join(f"{m.agent}: {m.text}" for m in e.messages)] for e in chosen
    ]
    for tracker in accelerator.trackers:
        table = getattr(importlib.import_module(tracker.name), "Table", None)
        if tracker.name == "tensorboard":
            tracker.writer.add_text("transcripts", _markdown(rows), step)
        elif table is not None:
            tracker.log({"transcripts": table(columns=COLUMNS, data=rows)}, step=step)


def _markdown(rows: Sequence[Sequence[Any]]) -> str:
    cells = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in row) + " |" for row in cells)


def _cell(value: Any) -> str:
    """Text of a model shows as text: TensorBoard renders Markdown and drops what HTML is unsafe."""
    return str(value).replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("\n", "<br>")
