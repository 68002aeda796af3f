"""`teamtr-lora docs`: the list, a page piped and paged, a wrong topic, and that the pages are in the wheel."""

from __future__ import annotations

import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

from teamtr_lora.cli import main
from teamtr_lora.cli.docs_command import TOPICS, _sections, topic_text

DOCS = Path(sys.modules["teamtr_lora"].__file__ or "").parent / "docs"


def test_the_list_has_one_line_a_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(TOPICS)
    for line in lines:
        topic, about = line.split(maxsplit=1)
        assert 20 < len(about) < 110 and about.endswith("."), line
        title, empty, first = topic_text(topic).splitlines()[:3]
        assert title.startswith("# ") and empty == "" and first == about


def test_every_page_is_a_topic() -> None:
    assert {path.stem for path in DOCS.glob("*.md")} == set(TOPICS)


def test_a_page_is_plain_text_where_output_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "trust_region"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# The trust region in practice\n") and out.endswith("\n") and "\x1b" not in out


def test_comments_for_tests_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "<!--" in (DOCS / "environments.md").read_text()
    main(["docs", "environments"])
    assert "<!--" not in capsys.readouterr().out


def test_a_terminal_gets_a_pager(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(pydoc, "pager", shown.append)
    assert main(["docs", "security"]) == 0
    assert [text.split() for text in shown] == [topic_text("security").split()]


def test_other_spellings_of_a_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "Getting-Started"]) == 0
    assert capsys.readouterr().out.startswith("# Getting started\n")


@pytest.mark.parametrize(
    ("word", "said"), [("trust_regin", "did you mean 'trust_region'?"), ("zzz", "docs without a word lists the topics")]
)
def test_a_wrong_topic_is_one_line_and_exit_2(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", word]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and said in captured.err


def test_the_wheel_gets_every_file_of_the_package() -> None:
    """Hatch packs what git does not ignore, and asks .gitignore even about files that are tracked."""
    files = [str(path) for path in DOCS.parent.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    asked = subprocess.run(["git", "check-ignore", "--no-index", *files], cwd=DOCS, capture_output=True, text=True)
    assert asked.returncode in (0, 1), asked.stderr
    assert asked.stdout == ""


def test_another_word_is_looked_up_in_headings_then_in_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    def found(word: str) -> list[tuple[str, str]]:
        assert main(["docs", word]) == 0
        return [(line.split()[0], line.split(maxsplit=1)[1].strip()) for line in capsys.readouterr().out.splitlines()]

    assert ("trust_region", "Choosing delta") in found("choosing")
    assert ("getting_started", "What a run leaves behind") in found("KILL"), "no heading has it"
    assert _sections("# a\n```\n# b\n```\n## c\n") == [("a", "```\n# b\n```\n"), ("c", "")], "code has no headings"
    assert main(["docs", "certificats"]) == 2
    assert "is no topic, and no page speaks of it; did you mean 'certificates'?" in capsys.readouterr().err
