"""argparse, with every mistake in one line that names the nearest right word."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NoReturn

from teamtr_lora.common.consoles import say


class Parser(argparse.ArgumentParser):
    """Its subcommands are parsers of this class too."""

    def error(self, message: str) -> NoReturn:
        said = " ".join(message.split())
        say(f"{self.prog}: {said}{'' if said.endswith('?') else ';'} see: {self.prog} --help", stderr=True)
        self.exit(2)

    def refuse(self, words: list[str]) -> NoReturn:
        """`words` are what parse_known_args could not place; an unknown option may have its value behind it."""
        unknown = [word.partition("=")[0] for word in words if word.startswith("-")]
        if not unknown:
            self.error(f"unexpected argument {words[0]!r}")
        options = [option for action in self._actions if action.help != argparse.SUPPRESS for option in action.option_strings]
        if unknown[0] in options:
            self.error(f"option {unknown[0]!r} stands before its command; write {self.prog} {unknown[0]}")
        if any(action.dest == "overrides" for action in self._actions) and (key := _setting(unknown[0])):
            self.error(f"unknown option {unknown[0]!r}; settings are written without dashes: {key}=VALUE")
        self.error(f"unknown option {unknown[0]!r}{_meant(unknown[0], options)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        meant = _meant(str(value), known)
        if isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(None, f"unknown command {value!r}{meant}")
        raise argparse.ArgumentError(action, f"invalid choice: {value!r} (choose from {', '.join(known)}){meant}")


def _setting(option: str) -> str | None:
    """The recipe key that an option is named after, whole or by its last part; None where it is none, or several."""
    from teamtr_lora.recipe.reference import recipe_keys

    name = option.lstrip("-").replace("-", "_")
    keys = {key.name for key in recipe_keys() if name in (key.name, key.name.rpartition(".")[2])}
    return keys.pop() if len(keys) == 1 else None


def _meant(word: str, known: Iterable[str]) -> str:
    from teamtr_lora.common.settings import nearest

    like = nearest(word, known)
    return f"; did you mean {like!r}?" if like else ""
