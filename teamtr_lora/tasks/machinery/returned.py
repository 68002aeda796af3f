"""What the methods of a task may return. A user's own class is held to it wherever it is called: a mistake is one line that names
the method, not an error deep inside this library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from teamtr_lora.common.code_paths import raised, user_code
from teamtr_lora.common.errors import UserError


def _by_name(kind: type | tuple[type, ...]) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, dict) and all(isinstance(k, str) and isinstance(v, kind) for k, v in found.items())


def _one_each(found: Any) -> bool:
    return hasattr(found, "__len__") and hasattr(found, "__iter__") and not isinstance(found, (str, bytes, Mapping))


_TEXT_OR_NONE = ("a text or None", lambda found: isinstance(found, str | None))
RETURNS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "open": ("an Interaction", lambda found: hasattr(found, "first") and hasattr(found, "feed")),
    "score": ("one number for each episode, in a list", _one_each),
    "credit": ("one mapping or None for each episode, in a list", _one_each),
    "answer": _TEXT_OR_NONE,
    "vote": _TEXT_OR_NONE,
    "categories": ('texts by name, such as {"level": "5"}', _by_name(str)),
    "measures": ('numbers by name, such as {"steps": 3.0}', _by_name((int, float))),
    "part": ("a whole number", lambda found: isinstance(found, int)),
    "message_correct": ("True, False or None", lambda found: isinstance(found, bool | None)),
}


def checked(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a user's own task, which returns what it should or raises a UserError."""
    words, fits = RETURNS[name]

    @wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        where = f"{type(self).__name__}.{name}"
        try:
            with user_code():
                found = method(self, *args, **named)
        except UserError:
            raise
        except Exception as error:  # whatever the user's method raises
            raise UserError(f"{where} {raised(error)}") from error
        if not fits(found):
            raise UserError(f"{where} returned {found!r:.60}; it must return {words}")
        return found

    return call
