"""Following a run while it trains: each look reads what is new in metrics.jsonl and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from teamtr_lora.common.foreign_files import open_regular
from teamtr_lora.runs.layout import MAX_METRICS_BYTES, METRICS
from teamtr_lora.runs.metrics import MetricsRow, parse_row


class RowFollower:
    """The rows of a run directory so far."""

    def __init__(self, run: Path) -> None:
        self._path = run / METRICS
        self.rows: list[MetricsRow] = []
        self._end = 0  # bytes that have been read, whole lines only
        self._last = b""  # the newest of these lines
        self._seen: tuple[int, int] | None = None  # size and time of the file at the last look

    def look(self) -> bool:
        """Whether there is anything new in `rows`. A resumed run may have cut off rows and written others: then all are new."""
        try:
            file = open_regular(self._path, f"{self._path}")
        except FileNotFoundError:
            return False
        with file:
            status = os.fstat(file.fileno())
            if (status.st_size, status.st_mtime_ns) == self._seen:
                return False
            self._seen = (status.st_size, status.st_mtime_ns)
            file.seek(self._end - len(self._last))
            if file.read(len(self._last)) != self._last:
                file.seek(0)
                self.rows, self._end, self._last = [], 0, b""
            data = file.read(MAX_METRICS_BYTES)
        lines = data.split(b"\n")[:-1]
        for line in lines:
            self.rows.append(parse_row(line, f"{self._path}: line {len(self.rows) + 1}"))
            self._end, self._last = self._end + len(line) + 1, line + b"\n"
        return bool(lines)
