"""Every label of the paper that the code cites is explained in teamtr_lora/docs/algorithm.md."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

import teamtr_lora

ROOT = Path(teamtr_lora.__file__).resolve().parent.parent
PAGE = ROOT / "teamtr_lora" / "docs" / "algorithm.md"
_LABEL = re.compile(r"\b(?:(?:app:)?(?:eq|exp)|alg|app|ass|cor|def|fig|lem|prop|rem|sec|tab|thm):[A-Za-z][\w:-]*\w")


@cache
def cited() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    files = [path for folder in ("teamtr_lora", "tools", "tests", "recipes") for path in (ROOT / folder).rglob("*")]
    for path in files:
        if path.suffix in (".py", ".yaml", ".md") and path not in (PAGE, Path(__file__)):
            for label in _LABEL.findall(path.read_text(encoding="utf-8")):
                found[label].append(str(path.relative_to(ROOT)))
    return found


def explained() -> dict[str, str]:
    """By label: the cell of the table beside it."""
    return dict(re.findall(r"^\| `([\w:-]+:[\w:-]+)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.M))


def test_labels_are_found_where_they_are_cited() -> None:
    assert {"eq:group_adv", "thm:stage-hp", "def:kltok", "app:exp:zeta"} <= cited().keys()


@pytest.mark.parametrize("label", sorted(cited()))
def test_a_cited_label_is_explained(label: str) -> None:
    says = explained().get(label)
    assert says, f"{label}, cited in {cited()[label][0]}, needs a line in a table of labels of {PAGE.name}"
    assert len(says.split()) >= 4, f"{label}: {says!r} explains nothing"


def test_labels_elsewhere_on_the_page_are_explained_too() -> None:
    found = set(_LABEL.findall(PAGE.read_text(encoding="utf-8")))
    assert found == explained().keys()


def test_no_label_is_explained_that_nobody_cites() -> None:
    """Not in the code, the tests, the recipes or other pages, nor a second time on this one."""
    counts = Counter(_LABEL.findall(PAGE.read_text(encoding="utf-8")))
    assert not {label for label in explained() if label not in cited() and counts[label] == 1}


def test_no_label_is_explained_twice() -> None:
    lines = re.findall(r"^\| `([\w-]+:[\w:-]+)` \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(lines) == len(set(lines)) > 40
