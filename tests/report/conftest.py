"""Made-up runs, and a browser where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from headless_browser import CHROMIUM, Tab, open_tab, running_browser
from made_up_run import make_run

from teamtr_lora.report.run_data import RunData, read_named_runs


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has everything a figure can show. Read only."""
    return make_run(tmp_path_factory.mktemp("full") / "full", 12, swap=True)


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was neither probed nor swapped. Read only."""
    return make_run(tmp_path_factory.mktemp("bare") / "bare", 6, probed=False)


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a thousand updates. Read only."""
    return make_run(tmp_path_factory.mktemp("long") / "long", 1000, episodes_every=25)


@pytest.fixture(scope="session")
def full_data(full: Path) -> RunData:
    return read_named_runs([full])[0]


@pytest.fixture(scope="session")
def browser() -> Iterator[str]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with running_browser() as address:
        yield address


@pytest.fixture
def tab(browser: str) -> Iterator[Tab]:
    with open_tab(browser) as found:
        found.show()
        yield found
