"""What commands print on a narrow terminal, and in a pipe: words are never broken, and a pipe's lines never wrapped."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from made_up_run import make_run

from teamtr_lora.cli import main
from teamtr_lora.cli.docs_command import TOPICS, topic_text
from teamtr_lora.common.consoles import wrapped

REPO = Path(__file__).resolve().parents[2]
QUICKSTART = str(REPO / "recipes" / "quickstart.yaml")
COMMANDS = [
    ["plan", QUICKSTART],
    ["plan", QUICKSTART, "--from", "RUN"],
    ["keys", "trust_region"],
    ["keys", "lora_r"],
    ["tasks", "list"],
    ["tasks", "show", "column_sum"],
    ["runs", "RUN"],
    ["certify", "RUN"],
    ["diagnose", "RUN"],
    ["adapters", "list", "--registry", "REGISTRY"],
    ["adapters", "show", "column_sum", "--registry", "REGISTRY"],
    ["adapters", "show", "column_sum", "--agent", "solver", "--registry", "REGISTRY"],
    ["adapters", "verify", "RUN"],
    ["docs"],
    ["train", QUICKSTART, "training.learning_rat=1", "team.agents.0.nme=x"],
    ["adapters", "shw"],
    ["baseline", "--help"],
]
FRAMES = re.compile("[\u2500-\u257f]")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("narrow") / "run", 6, swap=True)


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    with contextlib.suppress(SystemExit):
        main(words)
    out, err = capsys.readouterr()
    return (out + err).splitlines()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command).replace(str(REPO), ""))
def test_sixty_columns_wrap_between_words(
    command: list[str], run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"RUN": str(run), "REGISTRY": str(REPO / "adapters")}
    words = [places.get(word, word) for word in command]
    monkeypatch.setenv("COLUMNS", "60")
    narrow = said(words, capsys)
    monkeypatch.setenv("COLUMNS", "1000")
    wide = {word.rstrip(",") for line in said(words, capsys) for word in FRAMES.sub(" ", line).split()}
    memory = re.compile(r"[0-9.,]+")  # what `plan` says of this machine may change meanwhile
    broken = {word for line in narrow for word in FRAMES.sub(" ", line).split() if word.rstrip(",") not in wide}
    assert narrow and not [word for word in broken if not memory.fullmatch(word)]
    # what cannot be wrapped: one word, and a command to copy
    assert all(len(line) <= 60 or line.startswith("  teamtr-lora") or len(max(line.split(), key=len)) > 40 for line in narrow)


def test_a_pipe_gets_whole_lines(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    plan = said(["plan", QUICKSTART, "--from", str(run)], capsys)
    assert any(line.startswith("Expected time: ") and line.endswith("as there.") for line in plan)
    assert any(line.startswith("Such a run will not measure") and line.endswith(".") for line in plan)
    teams = said(["adapters", "list", "--registry", str(REPO / "adapters")], capsys)
    assert len(teams) == 2 and teams[1].startswith("column_sum ") and teams[1].rstrip().endswith("Z")


def test_documentation_is_wrapped_without_losing_a_word() -> None:
    for topic in TOPICS:
        text = topic_text(topic)
        narrow = wrapped(text, 60)
        assert narrow.split() == text.split()
        assert [line for line in narrow.splitlines() if line.startswith(("|", "#"))] == [
            line for line in text.splitlines() if line.startswith(("|", "#"))
        ]
