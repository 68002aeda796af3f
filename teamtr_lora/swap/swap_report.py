"""What a swap is asked for, what it tells while it is at work, and what it reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from teamtr_lora.recipe import Recipe
from teamtr_lora.rollout.collector import Progress
from teamtr_lora.swap.compatibility import Check
from teamtr_lora.swap.shock import Shock, TeamScore
from teamtr_lora.swap.stage0 import Alignment


@dataclass(frozen=True)
class SwapOptions:
    """What is None is the recipe's `swap` section's."""

    agent: str
    spec: str
    stage0: bool | None = None
    probe_contexts: int | None = None
    delta_align: float | None = None
    items: int | None = None  # held-out items of the swap shock; None: evaluation.items

    def applied(self, recipe: Recipe) -> Recipe:
        given = {"stage0": self.stage0, "probe_contexts": self.probe_contexts, "delta_align": self.delta_align}
        chosen = {key: value for key, value in given.items() if value is not None}
        swap = type(recipe.swap).model_validate(recipe.swap.model_dump() | chosen)
        return recipe.model_copy(update={"swap": swap}).placed_in(recipe.folder)


@dataclass(frozen=True)
class SwapReport:
    team: str
    agent: str
    source: str
    how: str  # stage0, direct, or dry run
    old: str
    new: str | None  # None: nothing was changed
    content_hash: str | None
    versions: dict[str, str]
    checks: list[Check]
    alignment: Alignment | None
    before: TeamScore | None
    direct: TeamScore | None
    aligned: TeamScore | None
    shock_direct: Shock | None
    shock_aligned: Shock | None
    sampled_tokens: int
    trained_tokens: int
    seconds: float
    plan: list[str]  # dry run: what would be done

    def as_dict(self) -> dict[str, Any]:
        data = asdict(self)
        for key in ("before", "direct", "aligned"):
            if data[key]:
                del data[key]["by_item"]
        return data


class Listener:
    """What a command shows while a swap is at work. This one shows nothing."""

    def checks(self, checks: list[Check]) -> None: ...

    def phase(self, text: str) -> Progress | None: ...


def report_from(data: dict[str, Any]) -> SwapReport:
    """A report as JSON back into one."""
    scores = {key: TeamScore(**data[key]) if data[key] else None for key in ("before", "direct", "aligned")}
    shocks = {key: Shock(**data[key]) if data[key] else None for key in ("shock_direct", "shock_aligned")}
    checks = [Check(**check) for check in data["checks"]]
    alignment = Alignment.from_dict(data["alignment"]) if data["alignment"] else None
    return SwapReport(**{**data, **scores, **shocks, "checks": checks, "alignment": alignment})
