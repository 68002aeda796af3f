"""What the verifiers need in the data of an item, checked where items come from a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from teamtr_lora.common.errors import UserError

LONGEST_SHOWN = 60


class Form(BaseModel):
    """The fields of an item's data, with their types; what else there is, is not looked at."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


def check_form(form: type[Form], data: Mapping[str, Any], where: str) -> None:
    """Raises UserError with the first field that is not as it must be."""
    try:
        form.model_validate(dict(data))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        value = "" if first["type"] == "missing" else f" = {shown(first['input'])}"
        raise UserError(f"{where}: {f'{place}{value}: ' if place else ''}{reason[:1].lower()}{reason[1:]}") from error


def content_text(content: Any) -> str | None:
    """What a chat turn says: its content is a text, or a list of parts that have text; None for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        return None
    parts = [{"text": part} if isinstance(part, str) else part for part in content]
    texts = [part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None for part in parts]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None


def shown(value: Any) -> str:
    """A value in a message: one line, not a long one."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
