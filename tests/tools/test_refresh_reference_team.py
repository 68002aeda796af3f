"""tools/refresh_reference_team.py: it writes into the shipped registry, so asking what it does must not run it."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def test_help_explains_and_does_nothing(
    tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    refresh = tool("refresh_reference_team")
    monkeypatch.setattr(refresh, "FILE", tmp_path / "none.json")  # running would fail on it
    for argv, code in (["--help"], 0), (["--hlep"], 2):
        monkeypatch.setattr("sys.argv", ["refresh_reference_team.py", *argv])
        with pytest.raises(SystemExit) as caught:
            refresh.main()
        assert caught.value.code == code
    assert "manifests of the shipped team" in capsys.readouterr().out
