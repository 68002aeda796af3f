"""What a run writes about itself, and what that may cost."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from teamtr_lora.recipe.sections import Section


class DiagnosticsSection(Section):
    """What is written for people to read."""

    save_episodes: Literal["all", "none"] | Annotated[int, Field(ge=0)] = Field(
        default="all", description="Episodes per update written to the run's episodes folder: all, none or a number."
    )
