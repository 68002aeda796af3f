"""Benchmark tasks: items from a file or hub dataset in the benchmark's own format, or from a generator."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.machinery.forms import content_text, shown
from teamtr_lora.tasks.machinery.overlap import OnOverlap, normalised, refuse_overlap, shared_items
from teamtr_lora.tasks.machinery.task import CATEGORIES, Item, Items, Split, Task, item_of
from teamtr_lora.team import Episode


class BenchTask(Task):
    """Override `row_item` and `verdict`, and `generated` where items can be made. Rows come by `use_rows`."""

    _splits: dict[str, BenchItems] | None = None

    def row_item(self, row: Mapping[str, Any], name: str) -> Item:
        """A row in the benchmark's format as an item; raises UserError for a row that is none."""
        raise TypeError(f"{type(self).__name__} reads no rows")

    def generated(self, split: Split) -> Items:
        raise UserError(f"task.name = {self.name!r} needs items: give task.path (a local file) or task.hub (a hub id)")

    def items(self, split: Split) -> Items:
        return self._splits[split] if self._splits is not None else self.generated(split)

    def use_rows(self, train: Any, test: Any | None, test_fraction: float, on_overlap: OnOverlap = "refuse") -> None:
        """Without test rows, a share of the train rows is held out: the benchmark's own, or by a hash of the text."""
        if test is None:
            train, test = self.split_rows(train) or (train, None)
        everything = BenchItems(self, train, "train", self.usable(train, "train"))
        if test is not None:
            self._splits = {"train": everything, "test": BenchItems(self, test, "test", self.usable(test, "test"))}
            self.settle_overlap(on_overlap)
            return
        sides: dict[str, bool] = {}  # copies of a problem that differ in spacing or case go where the first one goes
        held = [sides.setdefault(normalised(text), self._held_out(text, test_fraction)) for text in map(self.text, everything)]
        if all(held) or not any(held):
            raise UserError(
                f"task.test_fraction = {test_fraction}: holding that share of {len(train)} items out leaves the "
                f"{'train' if all(held) else 'test'} split empty; give test items (task.test_path; from Python eval_dataset) or "
                "another fraction"
            )
        self._splits = {"train": everything.where("train", [not out for out in held]), "test": everything.where("test", held)}

    def settle_overlap(self, on_overlap: OnOverlap, fix: str = "set task.on_overlap=drop") -> None:
        """Refuses train items that are test items too, or leaves them out."""
        assert self._splits is not None
        train = self._splits["train"]
        sides = [((item.id, self.text(item)) for item in self._splits[side]) for side in ("train", "test")]
        pairs = [] if on_overlap == "allow" else shared_items(*sides)
        if on_overlap == "refuse":
            refuse_overlap(pairs, fix)
        if pairs:
            shared = {name for name, _ in pairs}
            self._splits["train"] = train.where("train", [item.id not in shared for item in train])
            if not self._splits["train"].size:
                raise UserError("every train item is a test item too; nothing is left to train on")

    def _held_out(self, text: str, fraction: float) -> bool:
        digest = hashlib.sha256(self.hashed(text).encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big") < fraction * 2**64

    def hashed(self, text: str) -> str:
        """What of an item's text decides whether it is held out."""
        return normalised(text)

    def usable(self, rows: Any, split: Split) -> Sequence[int]:
        """The places of the rows that are items."""
        return range(len(rows))

    def lost_answer(self, row: Mapping[str, Any]) -> bool:
        """Whether the row has a place for its answer and nothing there."""
        return False

    def split_rows(self, rows: Any) -> tuple[Any, Any] | None:
        """Train and test rows as the benchmark itself divides them, where it does."""
        return None

    def text(self, item: Item) -> str:
        """What makes two items the same problem."""
        return str(item.data.get("problem", item.prompt))

    def verdict(self, item: Item, text: str) -> float:
        """The reward of an answer."""
        raise TypeError(f"{type(self).__name__} has no verdict")

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        return [self.verdict(item_of(e), e.answer_text) if e.messages else 0.0 for e in episodes]


class BenchItems:
    """Rows of a split by position; a row becomes an item when it is asked for."""

    def __init__(self, task: BenchTask, rows: Any, split: Split, places: Sequence[int]) -> None:
        self._task, self._rows, self._split, self._places = task, rows, split, places
        self.size: int | None = len(places)

    def __getitem__(self, position: int) -> Item:
        place = self._places[position]
        row = self._rows[place]
        named = f" ({row['id']})" if row.get("id") is not None else ""
        item = self._task.row_item(row, f"{self._split}-{place}{named}")
        for column in CATEGORIES:  # what results are reported by, whether or not the verifier needs it
            if isinstance(row.get(column), (str, int)):
                item.data.setdefault(column, row[column])
        return item

    def where(self, split: Split, kept: Sequence[bool]) -> BenchItems:
        places = [place for place, keep in zip(self._places, kept, strict=True) if keep]
        return BenchItems(self._task, self._rows, split, places)

    def __iter__(self) -> Iterator[Item]:
        return (self[position] for position in range(len(self._places)))


def field(row: Mapping[str, Any], name: str, columns: Sequence[str], kind: type | tuple[type, ...] = str) -> Any:
    """The first of `columns` that the row has, whatever the case of its name."""
    lower = {str(key).lower(): value for key, value in row.items()}
    there = [column for column in columns if lower.get(column) is not None and lower[column] != ""]
    for column in there:
        if isinstance(lower[column], kind) and not isinstance(lower[column], bool):
            return lower[column]
    if there:
        kinds = " or ".join(KIND_WORDS.get(one, one.__name__) for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise UserError(f"item {name}: {there[0]} = {shown(lower[there[0]])} is not {kinds}")
    empty = next((column for column in columns if column in lower), None)
    if empty is not None:
        raise UserError(f"item {name}: {empty} is {'null' if lower[empty] is None else 'empty'}")
    raise UserError(f"item {name}: has no {' or '.join(columns)}; it has {', '.join(map(str, row)) or 'no columns'}")


KIND_WORDS: dict[type, str] = {str: "text", int: "a whole number", float: "a number", list: "a list", dict: "an object"}
KIND_WORDS[Mapping] = "an object"


def turns_text(prompt: Any, name: str) -> str:
    """The text of a prompt, which may be a conversation (verl's layout)."""
    if isinstance(prompt, str):
        return prompt
    texts = [content_text(turn.get("content")) if isinstance(turn, Mapping) else None for turn in prompt]
    if not texts or None in texts:
        raise UserError(f"item {name}: prompt = {shown(prompt)} is neither text nor a list of {{role, content}}")
    return "\n\n".join(map(str, texts))
