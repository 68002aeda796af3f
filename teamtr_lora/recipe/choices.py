"""Keys whose values are the names of a table: a class added to the table is a name that recipes accept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class OneOf:
    """`Annotated[str, OneOf(TABLE)]`: one of the table's names, looked up each time a recipe is checked.

    `words`: the attribute in which each entry says what it is."""

    _made: ClassVar[list[OneOf]] = []

    def __init__(self, table: Mapping[str, Any], words: str = "words") -> None:
        self.table, self._words = table, words
        self._made.append(self)

    @classmethod
    def known(cls) -> tuple[tuple[str, ...], ...]:
        """The names of all tables as they are now."""
        return tuple(tuple(one.table) for one in cls._made)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._known, core_schema.str_schema(strict=True))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.table), "type": "string"}

    def _known(self, value: str) -> str:
        if value not in self.table:
            raise PydanticCustomError("literal_error", "must be one of {names}", {"names": ", ".join(self.table)})
        return value

    def in_words(self, schema: dict[str, Any]) -> None:
        """For `json_schema_extra`: adds each name, with the words of its entry, to the key's description."""
        words = {name: getattr(kind, self._words, "") for name, kind in self.table.items()}  # a class of the user's may have none
        names = "; ".join(f"{name}: {said}" if said else name for name, said in words.items())
        schema["description"] = f"{schema['description']}: {names}."
