"""Who answers a team that talks to somebody outside it: the `task.responder` section of a recipe."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from teamtr_lora.recipe.team_sections import DATA_FILE, SERVER_URL, ApiKeyVariable, Section, Text, refuse


class ResponderSection(Section):
    """Suspects, a referee or a customer, played by a model behind an OpenAI-compatible server, or by a file of replies."""

    url: Annotated[str, Field(pattern=SERVER_URL)] | None = Field(
        default=None,
        description="Address of any OpenAI-compatible server, such as http://localhost:8000/v1. Give either url or script.",
    )
    model: Text | None = Field(default=None, description="Model to ask; null takes the first that the server lists.")
    script: Annotated[str, Field(pattern=DATA_FILE)] | None = Field(
        default=None,
        description="File of replies instead of a server, relative to the recipe: rows {when, reply}; the first whose `when` is "
        "in what was said, or that has none, answers.",
    )
    api_key_variable: ApiKeyVariable = Field(
        default="RESPONDER_API_KEY",
        description="Environment variable that holds the server's API key, if it asks for one; its name ends in API_KEY.",
    )
    timeout_seconds: float = Field(default=120.0, gt=0, description="Longest wait for one reply, in seconds.")
    retries: int = Field(default=4, ge=0, description="Further tries when the server fails or is busy, after growing pauses.")
    requests: int = Field(default=32, ge=1, description="Most requests in flight at a time.")
    context_characters: int = Field(
        default=40_000,
        ge=1000,
        description="Longest conversation that is sent, in characters; beyond it the oldest turns are left out, so that one that "
        "goes on and on does not overflow the model's context.",
    )
    max_tokens: int = Field(default=256, ge=1, description="Longest reply in tokens.")
    temperature: float = Field(default=0.7, ge=0, description="The responder's sampling temperature.")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.url is not None and self.script is not None:
            refuse("responder", [(("script",), self.script, "url is given too, and one of them answers", "keep either")])
        return self
