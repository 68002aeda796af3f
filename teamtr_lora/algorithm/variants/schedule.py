"""How a learning rate of the recipe's own changes from the first stage to the last."""

from __future__ import annotations

from typing import ClassVar


class Schedule:
    words: ClassVar[str] = "the same in every stage"
    trl: ClassVar[str] = "constant"  # what TRL calls it
    changes: ClassVar[bool] = False

    def share(self, stage: int, stages: int) -> float:
        """Of the learning rate, in stage number `stage` of 1 to `stages`."""
        return 1.0


class Linear(Schedule):
    words = "falls to nothing by the end of the last one, so that the noise of late steps averages out"
    trl = "linear"
    changes = True

    def share(self, stage: int, stages: int) -> float:
        return (stages - stage + 1) / stages


SCHEDULES: dict[str, type[Schedule]] = {"constant": Schedule, "linear": Linear}
