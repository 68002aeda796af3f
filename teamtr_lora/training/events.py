"""Callbacks of transformers' `TrainerCallback` type, called at a team run's natural points.

    on_train_begin, on_train_end          the run              on_epoch_begin, on_epoch_end     a stage
    on_step_begin, on_step_end            one agent's update   on_log (logs=row)                each metrics row
    on_evaluate (metrics=...)             an evaluation        on_save                          a checkpoint

`args` is the run's TeamTRConfig, with the few of TrainingArguments' names that say the same of a team. `metrics` is the
evaluation, its accuracy once more as `eval_accuracy`, which transformers' EarlyStoppingCallback goes by.
An update's adapter is in the run directory by the next on_save, on_evaluate or on_epoch_end, not yet when its row is logged.
`control.should_training_stop` ends the run after the update in progress. A callback may also define `on_progress(phase, done,
total, tokens)`, called during rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import TeamTRConfig

# What transformers' own callbacks read of TrainingArguments and has one meaning for a team.
_ALSO = {
    "metric_for_best_model": "eval_accuracy",
    "greater_is_better": True,
    "eval_strategy": "epoch",
    "load_best_model_at_end": True,  # no warning: every version stays in the run directory
    "logging_strategy": "epoch",
    "disable_tqdm": False,
}
_TRACKED = {"TensorBoardCallback": "tensorboard", "WandbCallback": "wandb", "TrackioCallback": "trackio"}


def checked_callback(callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback:
    """The callback, made of its class where that was given. Refused by name where it cannot work here: before it is made, since
    a tracker's asks for its package then."""
    kind = callback if isinstance(callback, type) else type(callback)
    if not issubclass(kind, TrainerCallback):
        raise UserError(f"callbacks: {callback!r} is no TrainerCallback of transformers; make its class a subclass of that")
    for parent in kind.__mro__:
        if parent.__module__.startswith("transformers.integrations"):
            tracker, instead = _TRACKED.get(parent.__name__), "write a TrainerCallback whose on_log takes each row (logs=)"
            if tracker:
                instead = f"leave it out and set trackers=[{tracker!r}] in TeamTRConfig, which logs every agent"
            raise UserError(
                f"callbacks: {kind.__name__} logs one model and its TrainingArguments, which a team has not; {instead}"
            )
    try:
        return callback() if isinstance(callback, type) else callback
    except TypeError as error:
        raise UserError(f"callbacks: {kind.__name__}() failed ({error}); give an instance that you made yourself") from error


class CallbackArgs:
    """A run's settings as callbacks see them."""

    def __init__(self, config: TeamTRConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name in _ALSO:
            return _ALSO[name]
        if name != "_config" and hasattr(self._config, name):
            return getattr(self._config, name)
        raise AttributeError(f"args.{name}: a team run has no such setting", name=name, obj=self)


# What transformers' Trainer also gives: there is no one model that is trained.
NO_MODEL = dict.fromkeys(("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"))


class Events:
    def __init__(self, callbacks: Sequence[TrainerCallback], config: TeamTRConfig, updates: int) -> None:
        self._callbacks, self._args = list(callbacks), CallbackArgs(config)
        self.state = TrainerState(max_steps=updates, num_train_epochs=config.training.stages)
        self.control = TrainerControl()

    def fire(self, event: str, **details: Any) -> None:
        for callback in self._callbacks:
            try:
                result = getattr(callback, event)(self._args, self.state, self.control, **NO_MODEL, **details)
            except AttributeError as error:
                if error.obj is not self._args:
                    raise
                raise UserError(
                    f"callbacks: {type(callback).__name__} reads args.{error.name}, a setting of transformers' TrainingArguments "
                    "that a team run has not; leave the callback out, or let it read the sections of TeamTRConfig"
                ) from error
            self.control = result if isinstance(result, TrainerControl) else self.control

    def heard(self, event: str) -> bool:
        """Whether a callback does something then."""
        return any(getattr(type(callback), event) is not getattr(TrainerCallback, event) for callback in self._callbacks)

    def log(self, row: dict[str, Any]) -> None:
        self.state.log_history.append(row)
        self.fire("on_log", logs=row)

    def evaluated(self, record: dict[str, Any]) -> None:
        accuracy = record["avg_at_k"]
        self.fire("on_evaluate", metrics={**record, "eval_accuracy": accuracy})
        if self.state.best_metric is None or accuracy > self.state.best_metric:
            self.state.best_metric = accuracy

    def note(self, text: str) -> None:
        """Something that is worth a line of the live view."""
        for callback in self._callbacks:
            if hasattr(callback, "on_note"):
                callback.on_note(text)

    def progress(self, phase: str, done: int, total: int, tokens: int) -> None:
        for callback in self._callbacks:
            if hasattr(callback, "on_progress"):
                callback.on_progress(phase, done, total, tokens)
