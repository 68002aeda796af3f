"""Callbacks of transformers' `TrainerCallback` type, called at a team run's natural points.

    on_train_begin, on_train_end          the run              on_epoch_begin, on_epoch_end     a stage
    on_step_begin, on_step_end            one agent's update   on_log (logs=row)                each metrics row
    on_evaluate (metrics=...)             an evaluation        on_save                          a checkpoint

`control.should_training_stop` ends the run after the update in progress. A callback may also define `on_progress(phase, done,
total, tokens)`, called during rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from teamtr_lora.recipe import TeamTRConfig


class Events:
    def __init__(self, callbacks: Sequence[TrainerCallback], config: TeamTRConfig, updates: int) -> None:
        self._callbacks, self._config = list(callbacks), config
        self.state = TrainerState(max_steps=updates, num_train_epochs=config.training.stages)
        self.control = TrainerControl()

    def fire(self, event: str, **details: Any) -> None:
        for callback in self._callbacks:
            result = getattr(callback, event)(self._config, self.state, self.control, **details)
            self.control = result if isinstance(result, TrainerControl) else self.control

    def log(self, row: dict[str, Any]) -> None:
        self.state.log_history.append(row)
        self.fire("on_log", logs=row)

    def progress(self, phase: str, done: int, total: int, tokens: int) -> None:
        for callback in self._callbacks:
            if hasattr(callback, "on_progress"):
                callback.on_progress(phase, done, total, tokens)
