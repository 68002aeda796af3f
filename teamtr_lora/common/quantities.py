"""Times and counts as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """In words: 3.2 s, 2 min 05 s, 47 min, 3 h 20 min, 2 d 4 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes >= 10:
        return f"{minutes} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def clock(seconds: float) -> str:
    """As a clock shows it: 4:56, 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def short(count: float) -> str:
    """1234 as 1.2k."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"
