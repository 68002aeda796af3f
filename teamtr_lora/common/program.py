"""How this program was started."""

from __future__ import annotations

import os
import shlex
import shutil
import sys


def program() -> str:
    """What to type to run this program again: its path where it is not on the shell's."""
    on_path = shutil.which("teamtr-lora") is not None or os.path.basename(sys.argv[0]) != "teamtr-lora"
    return "teamtr-lora" if on_path else shlex.quote(os.path.relpath(sys.argv[0]))
