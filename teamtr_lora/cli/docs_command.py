"""docs: the documentation that came with the package, one Markdown file a topic in teamtr_lora/docs."""

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
    docs.add_argument("topic", nargs="?", type=_topic, choices=TOPICS, metavar="TOPIC", help="what to read about, as listed")


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
    text = topic_text(args.topic)
    if sys.stdout.isatty():
        pydoc.pager(wrapped(text, shutil.get_terminal_size().columns))
    else:
        print(text, end="")


def _topic(word: str) -> str:
    return word.lower().replace("-", "_").removesuffix(".md")
