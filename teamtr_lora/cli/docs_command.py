"""docs: the documentation that came with the package, a Markdown file a topic in teamtr_lora/docs; other words are looked up."""

from __future__ import annotations

import argparse
import pydoc
import re
import shutil
import sys
from importlib.resources import files
from typing import Any

from rich.markup import escape
from rich.table import Table

from teamtr_lora.cli.text.tables import print_table
from teamtr_lora.common.consoles import Console, wrapped
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import nearest

# In reading order. A topic's file begins with a title, an empty line and the one line that the list of topics shows.
TOPICS = (
    "getting_started",
    "report",
    "recipes",
    "algorithm",
    "trust_region",
    "rollouts",
    "several_gpus",
    "environments",
    "plug_and_play",
    "certificates",
    "results",
    "security",
    "extending",
    "contributing",
    "changes",
)


def add_commands(command: Any) -> None:
    docs = command("docs", _docs, "Read the documentation; without a TOPIC, list the topics.")
    text = "what to read about, as listed; any other word lists the sections that speak of it"
    docs.add_argument("topic", nargs="?", metavar="TOPIC|WORD", help=text)


def topic_text(topic: str) -> str:
    """The Markdown of a topic, without the comments in it that only the tests read."""
    text = files("teamtr_lora").joinpath("docs", f"{topic}.md").read_text(encoding="utf-8")
    return re.sub(r"^<!--.*?-->\n", "", text, flags=re.MULTILINE | re.DOTALL)


def _docs(args: argparse.Namespace) -> None:
    if args.topic is None:
        table = Table("", "", box=None, pad_edge=False, show_header=False)
        for topic in TOPICS:
            table.add_row(topic, escape(topic_text(topic).splitlines()[2]))
        print_table(Console(), table)
        return
    topic = args.topic.lower().replace("-", "_").removesuffix(".md")
    if topic not in TOPICS:
        _look_up(args.topic)
        return
    text = topic_text(topic)
    if sys.stdout.isatty():
        pydoc.pager(wrapped(text, shutil.get_terminal_size().columns))
    else:
        print(text, end="")


def _look_up(word: str) -> None:
    """The sections in whose heading the word is, else those in whose text it is."""
    sections = [(topic, *section) for topic in TOPICS for section in _sections(topic_text(topic))]
    found = [(topic, heading) for topic, heading, _ in sections if word.lower() in heading.lower()]
    found = found or [(topic, heading) for topic, heading, text in sections if word.lower() in text.lower()]
    if not found:
        like = nearest(word, TOPICS)
        fix = f"did you mean {like!r}?" if like else "docs without a word lists the topics"
        raise UserError(f"{word!r} is no topic, and no page speaks of it; {fix}")
    table = Table("", "", box=None, pad_edge=False, show_header=False)
    for topic, heading in found:
        table.add_row(topic, escape(heading))
    print_table(Console(), table)


def _sections(text: str) -> list[tuple[str, str]]:
    """(heading, text) of each; a line of code that begins with # is no heading."""
    found: list[tuple[str, str]] = []
    in_code = False
    for line in text.splitlines():
        in_code ^= line.startswith("```")
        if line.startswith("#") and not in_code:
            found.append((line.lstrip("# "), ""))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
    return found
