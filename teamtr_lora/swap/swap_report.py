"""What a swap and a rebase are asked for, what they tell while they are at work, and what they report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe, RecipeError
from teamtr_lora.recipe.problems import check
from teamtr_lora.recipe.recipe_files import override
from teamtr_lora.rollout.collector import Progress
from teamtr_lora.swap.compatibility import Check
from teamtr_lora.swap.shock import Shock, TeamScore
from teamtr_lora.swap.stage0 import Alignment


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What is None is the recipe's `swap` section's."""

    probe_contexts: int | None = None
    delta_align: float | None = None
    items: int | None = None  # held-out items of the swap shock; None: evaluation.items
    settings: list[str] = field(default_factory=list)  # more of the `swap` section, as swap.key=value

    def applied(self, recipe: Recipe) -> Recipe:
        """The recipe with these settings in its `swap` section."""
        names = recipe.swap.model_dump()
        chosen = {key: value for key, value in vars(self).items() if key in names and value is not None}
        data = recipe.model_dump() | {"swap": names | chosen}
        if wrong := next((text for text in self.settings if not text.startswith("swap.")), None):
            raise UserError(f"{wrong}: of a recipe's settings those of its swap section can be given here, as swap.KEY=value")
        mistyped = [problem for text in self.settings if (problem := override(data, text))]
        changed, problems = check(data)
        if changed is None or mistyped:
            raise RecipeError([*mistyped, *problems], "the settings of the swap")
        return changed.placed_in(recipe.folder)


@dataclass(frozen=True)
class SwapOptions(_Options):
    """What `swap` is asked for."""

    agent: str
    spec: str  # what takes the agent's place: --with
    stage0: bool | None = None


@dataclass(frozen=True)
class RebaseOptions(_Options):
    """What `rebase` is asked for."""

    base: str
    out: Path | None = None
    spec: str = "fresh"  # what the new adapters are; what it leaves out is each agent's own
    extra_tokens: bool = False  # the new tokenizer may have tokens that the old one lacks


class _Report:
    def as_dict(self) -> dict[str, Any]:
        """For printing: all but the items one by one."""
        scores = {name: getattr(self, name) for name in ("before", "direct", "aligned")}
        return asdict(self) | {name: score.as_dict() for name, score in scores.items() if score}  # type: ignore[call-overload]


@dataclass(frozen=True)
class SwapReport(_Report):
    """What came of a swap, or of looking at one (`how` is then "dry run" and `plan` says what would be done)."""

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
    plan: list[str]


@dataclass(frozen=True)
class RebaseReport(_Report):
    """What came of a rebase."""

    team: str
    out: str
    old_base: str
    new_base: str
    old_versions: dict[str, str]
    versions: dict[str, str]
    checks: list[Check]
    alignments: dict[str, Alignment]
    before: TeamScore
    direct: TeamScore  # the new base with fresh adapters
    aligned: TeamScore
    shock_direct: Shock
    shock_aligned: Shock
    sampled_tokens: int
    trained_tokens: int
    seconds: float


class Listener:
    """What a command shows while a swap is at work. This one shows nothing."""

    def checks(self, checks: list[Check]) -> None: ...

    def phase(self, text: str) -> Progress | None: ...
