"""Where an update's time goes."""

from __future__ import annotations

import time


class PhaseClock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.monotonic()

    def lap(self, phase: str) -> None:
        """The time since the last lap was this phase's; one that comes again adds up."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._started
        self._started = now
