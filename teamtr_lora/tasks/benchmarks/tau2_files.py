"""The files of a tau2 domain beside its tasks: database, policy, official split."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.benchmarks.tau2_airline import AirlineTools
from teamtr_lora.tasks.benchmarks.tau2_retail import RetailTools
from teamtr_lora.tasks.benchmarks.tau2_tools import Record, Toolkit

KITS: dict[str, type[Toolkit]] = {"retail": RetailTools, "airline": AirlineTools}
TABLES = {"retail": ("users", "orders", "products"), "airline": ("users", "flights", "reservations")}


@dataclass(frozen=True)
class DomainFiles:
    """Where they are: as the recipe says, or under their usual names in the folder of the tasks. Read when first needed."""

    domain: str
    beside: Path  # the folder of the tasks
    database: Path | None = None
    policy: Path | None = None
    split: Path | None = None

    @cached_property
    def tables(self) -> dict[str, dict[str, Record]]:
        path = self._find("database", self.database, ("{}_db.json.gz", "{}_db.json", "db.json", "db.json.gz"))
        tables = read_json(path, "task.database", path.stat().st_mtime_ns)
        for name in TABLES[self.domain]:
            table = tables.get(name) if isinstance(tables, dict) else None
            if not isinstance(table, dict) or not all(isinstance(record, dict) for record in table.values()):
                raise UserError(f"task.database = {str(path)!r}: has no table {name!r}; give the {self.domain} database of tau2")
        return dict(tables)

    @cached_property
    def policy_text(self) -> str:
        path = self._find("policy", self.policy, ("{}_policy.md", "policy.md"))
        try:
            return path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"task.policy = {str(path)!r}: cannot be read ({error})") from error

    def split_ids(self) -> dict[str, list[str]] | None:
        """Ids of the official train and test tasks, where the file is there."""
        path = self.split or self._beside(("{}_split.json", "split_tasks.json"))
        if path is None:
            return None
        ids = read_json(path, "task.split", path.stat().st_mtime_ns if path.is_file() else 0)
        if not isinstance(ids, dict) or not all(isinstance(ids.get(side), list) for side in ("train", "test")):
            raise UserError(f"task.split = {str(path)!r}: is no {{train: [ids], test: [ids]}}")
        return {side: [str(name) for name in ids[side]] for side in ("train", "test")}

    def _find(self, key: str, given: Path | None, names: Sequence[str]) -> Path:
        path = given or self._beside(names)
        if path is None or not path.is_file():
            usual = " or ".join(name.format(self.domain) for name in names[:2])
            what = f"{str(path)!r}: no such file" if path else f"there is no {usual} in {str(self.beside)!r}"
            raise UserError(f"task.{key}: {what}; set task.{key} to the {self.domain} {key} of tau2-bench")
        return path

    def _beside(self, names: Sequence[str]) -> Path | None:
        found = (self.beside / name.format(self.domain) for name in names)
        return next((path for path in found if path.is_file()), None)


@lru_cache(maxsize=8)
def read_json(path: Path, key: str, changed: int) -> Any:
    """Read once a change of the file; nobody writes to what is returned."""
    try:
        raw = path.read_bytes()
        return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, ValueError, EOFError, zlib.error, RecursionError) as error:
        raise UserError(f"{key} = {str(path)!r}: cannot be read as JSON ({error})") from error
