"""The live view: one line an update, one a stage, and a bar that says what is going on and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from transformers.trainer_callback import TrainerCallback

from teamtr_lora.common.consoles import Console, print_hanging
from teamtr_lora.common.quantities import clock
from teamtr_lora.runs.run_dir import begin_from

MUCH = 0.1  # of a rollout's episodes: beyond this it is told what a limit has cost
COLOURS = {"accepted": "green", "shrunk": "yellow", "rejected": "red", "skipped": "dim"}
FAR_ABOVE = 100  # numerical floors: a radius so many times as large need not care
NOTEBOOK_SECONDS = 0.5  # between two changes of the line in a notebook, each of which is a message to the browser


class LiveView(TrainerCallback):
    """A callback like any other. On a terminal the bar moves, in a notebook a line of text does; elsewhere only the lines are
    printed."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = Console() if console is None else console
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[note]}"),
            console=self._console, transient=True,
        )  # fmt: skip
        self._notebook = _NotebookLine() if self._console.is_jupyter else None
        self._bar: Any = None
        self._rows_until = 0.0  # when the last row came
        self._evaluation = 0.0  # seconds of the last one
        self._updating = 0.0  # seconds of updates, since the start
        self._done_at_start = 0
        self._estimator = "exact"
        self._left_out: list[str] = []  # what the run does not measure; of a baseline, which cannot, nothing is said

    def on_train_begin(self, args: Any, state: Any, control: Any, run_dir: str = "", **kwargs: Any) -> None:
        if run_dir:
            self._console.print(f"run directory: {escape(run_dir)}")
        self._rows_until, self._done_at_start = time.monotonic(), state.global_step
        self._estimator = args.trust_region.estimator
        self._bar = self._progress.add_task("starting", total=max(1, state.max_steps), completed=state.global_step, note="")
        stages = args.training.stages
        finished = bool(state.epoch and state.epoch >= stages)  # updates are no measure: a stage that a swap cut short has more
        if finished:
            more = f"add {args.written('training.stages', 2 * stages)}"
            if args.training.rate_changes:  # which it does until the last stage
                more = begin_from(run_dir) if run_dir else "begin a new run"
            self._console.print(f"already finished ({stages} of {stages} stages); to go on, {escape(more)}")
        self._left_out = args.unmeasured() if run_dir and not finished else []
        if self._console.is_terminal:
            self._progress.start()

    def on_note(self, text: str) -> None:
        self._console.print(text, style="dim")

    def on_progress(self, phase: str, done: int, total: int, tokens: int) -> None:
        if self._bar is not None:
            note = f"{done}/{total} episodes" if total > 1 else ""
            self._progress.update(self._bar, description=phase, note=note)
            if self._notebook:
                self._notebook.show(f"{phase} {note}")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, order: list[str] | None = None, **kwargs: Any) -> None:
        self._console.print(f"[bold]stage {int(state.epoch) + 1}/{args.training.stages}[/]  order: {' -> '.join(order or [])}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs:
            return
        now = time.monotonic()
        took, self._rows_until = now - self._rows_until, now
        if logs["kind"] == "update":
            self._updating += took
            self._update_line(logs, state, self._left(args, state))
        else:
            self._evaluation = took if logs["evaluation"] else self._evaluation
            self._stage_line(logs, args)

    def _left(self, args: Any, state: Any) -> float:
        """Seconds, by what updates and the last evaluation took."""
        stages = args.training.stages
        due = sum(args.evaluation.due(stage, stages) for stage in range(int(state.epoch) + 1, stages + 1))
        done = max(1, state.global_step - self._done_at_start)
        return self._updating / done * (state.max_steps - state.global_step) + self._evaluation * due

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()
        if self._left_out:
            self._console.print(f"not measured: {'; '.join(self._left_out)}", style="dim")

    def close(self) -> None:
        """Gives the terminal back; also called when the run ends by an error or an interrupt."""
        if self._console.is_terminal:
            self._progress.stop()
        if self._notebook:
            self._notebook.close()

    def _update_line(self, row: dict[str, Any], state: Any, left: float) -> None:
        kl = row["kl"].get(self._estimator)
        bound = f"KL {_number(kl['mean'])} (bound {_number(kl['bound'])}) of {row['delta']:g}" if kl else "KL -"
        decision = row["decision"] if row["alpha"] is None else f"{row['decision']} x{row['alpha']:.2f}"
        why = "".join(f" ({escape(text)})" for text in (row["reason"], *_losses(row)) if text)
        speed = f"{row['tokens_per_second']:,.0f} tokens/s" if row["fresh_episodes"] else "same episodes"
        self._progress.update(self._bar, completed=state.global_step)
        print_hanging(
            self._console,
            f"  {row['agent']:<12} reward {row['reward_mean']:.3f}  {bound}  [{COLOURS[row['decision']]}]{decision:<14}[/]"
            f"  {speed}  {clock(left)} left{why}",
        )

    def _stage_line(self, row: dict[str, Any], args: Any) -> None:
        evaluation = row["evaluation"]
        if evaluation:
            error = evaluation["standard_error"]
            label = "before training" if row["stage"] == 0 else f"after stage {row['stage']}"
            spread = f" ± {error:.3f}" if error is not None else ""
            print_hanging(
                self._console,
                f"  [bold]held-out accuracy {label}: {evaluation['avg_at_k']:.3f}{spread}[/], mean reward "
                f"{evaluation['mean_reward']:.3f}",
            )
            if row["stage"] == 0 and evaluation["avg_at_k"] == 0 < evaluation["mean_reward"]:
                said = args.written("task.success_at_least")
                self._console.print(f"  no episode counts as right yet: none earned what a success needs (for a dataset: {said})")
        delta, floors = args.trust_region.delta, row["floors"] or {}
        if max(floors.values(), default=0.0) > delta / FAR_ABOVE:
            told = ", ".join(f"{name} {value:.1e}" for name, value in floors.items())
            self._console.print(
                f"  the smallest KL that passes can tell here: {told}; {args.written('trust_region.delta')} = {delta:g}",
                style="dim",
            )


class _NotebookLine:
    """One line of a notebook's output that changes. It needs nothing but IPython, which every notebook has."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = 0.0

    def show(self, text: str) -> None:
        from IPython.display import display

        now = time.monotonic()
        if self._handle is None:
            self._handle = display({"text/plain": text}, raw=True, display_id=True)
        elif now - self._shown >= NOTEBOOK_SECONDS:
            self._handle.update({"text/plain": text}, raw=True)
        else:
            return
        self._shown = now

    def close(self) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)


def _losses(row: dict[str, Any]) -> Iterator[str]:
    """What a limit has taken from the rollout, where it is much."""
    if row["overflowed_episodes"] > MUCH * row["episodes"]:
        yield f"{row['overflowed_episodes']} of {row['episodes']} episodes ended early: the context was full"
    if row["truncated_messages"] > MUCH * row["episodes"]:
        yield f"{row['truncated_messages']} messages of {row['episodes']} episodes were cut at their token limit"


def _number(value: float | None) -> str:
    return "inf" if value is None else f"{value:.4f}"
