"""One line before the libraries that take seconds to import, so that a command that will be long shows that it has begun."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from teamtr_lora.common.consoles import Console

_SLOW = {"train", "eval", "ask", "swap", "rebase", "baseline"}


@contextmanager
def telling_of_imports(command: str, *, first: bool) -> Iterator[None]:
    """Around a command; `first`: no other process of it has told already. A mistake that shows before torch is needed stays one
    line, and where torch is loaded already nothing is said."""
    finder = _BeforeTorch()
    if first and command in _SLOW:
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.leave()


class _BeforeTorch(MetaPathFinder):
    """Finds nothing; it is asked before torch is looked for."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torch":
            self.leave()
            Console(stderr=True).print("loading libraries", style="dim")
        return None

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
