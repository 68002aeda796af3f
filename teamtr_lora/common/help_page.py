"""Settings classes whose `help()` is a page: their own words and keys, without the hundreds of lines that pydantic adds."""

from __future__ import annotations

import textwrap
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class HelpPage(ModelMetaclass):
    """The metaclass of such settings. `help()` lists what `dir()` of the class does."""

    def __init__(cls, *args: Any, **kwargs: Any) -> None:  # noqa: N805
        super().__init__(*args, **kwargs)
        cls.__signature__ = Signature([Parameter("settings", Parameter.VAR_KEYWORD)])

    def __dir__(cls) -> list[str]:  # noqa: N805
        ours = [vars(base) for base in cls.__mro__ if base.__module__.startswith("teamtr_lora")]
        return sorted({name for names in ours for name in names if not name.startswith(("_", "model_"))})


def list_keys(model: type[BaseModel]) -> None:
    """Adds the model's keys to its docstring: a line each with its description; those of a section by name."""
    lines = []
    for name, field in model.model_fields.items():
        words, inner = field.description or "", getattr(field.annotation, "model_fields", {})
        if inner:
            words = f"{words.removesuffix('.')}: {', '.join(inner)}"
        lines += textwrap.wrap(words, 124, initial_indent=f"    {name:<14}", subsequent_indent=" " * 18)
    model.__doc__ = "\n".join([(model.__doc__ or "").rstrip(), "", *lines, ""])
