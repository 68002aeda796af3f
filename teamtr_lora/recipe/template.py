"""`init`: a commented recipe, a small dataset and a reward function to start from."""

from __future__ import annotations

import json
from pathlib import Path

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import write_atomic

STARTER = Path(__file__).resolve().parent.parent / "docs" / "starter"


def questions() -> list[dict[str, str]]:
    """Every sum of two two-digit numbers whose ones carry: where the embedded base errs most. No pair in both orders."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100) if a % 10 + b % 10 >= 10]
    return [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a, b in pairs]


def write_starter(folder: Path) -> list[Path]:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: already exists and is not empty; choose a new folder")
    contents = {file.name: file.read_text() for file in sorted(STARTER.iterdir()) if file.is_file()}
    contents["questions.jsonl"] = "".join(json.dumps(row) + "\n" for row in questions())
    for name, text in contents.items():
        write_atomic(folder / name, text)
    return [folder / name for name in contents]
