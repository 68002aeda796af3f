"""Values that several commands take, and how they are printed."""

from __future__ import annotations

import argparse
import json
from typing import Any

EXAMPLES = """examples:
  teamtr-lora train recipes/quickstart.yaml
  teamtr-lora train recipes/quickstart.yaml training.stages=4 trust_region.delta=0.02 --run-dir runs/try
  teamtr-lora train recipes/quickstart.yaml --run-dir runs/try --resume
  teamtr-lora eval runs/quickstart --k 4
  teamtr-lora ask runs/quickstart "347+285"
  teamtr-lora serve runs/quickstart --port 8000
"""
OVERRIDES = "section.key=value, for example training.stages=4 or team.agents.planner.lora.rank=16"


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature; use 0 or a positive number")
    return value


def port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; use a number from 1 to 65535")
    return int(text)


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; use a number between 0 and 1")
    return value


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))
