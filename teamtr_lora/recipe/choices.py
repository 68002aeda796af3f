"""Keys whose values are the names of a table: a class added to the table is a name that recipes accept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class OneOf:
    """`Annotated[str, OneOf(TABLE)]`: one of the table's names, looked up each time a recipe is checked."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.table = table

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._known, core_schema.str_schema(strict=True))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.table), "type": "string"}

    def _known(self, value: str) -> str:
        if value not in self.table:
            raise PydanticCustomError("literal_error", "must be one of {names}", {"names": ", ".join(self.table)})
        return value

    def described(self, lead: str) -> str:
        """A key's description: `lead`, then each name with its class's own words."""
        return f"{lead}: " + "; ".join(f"{name}: {kind.words}" for name, kind in self.table.items()) + "."
