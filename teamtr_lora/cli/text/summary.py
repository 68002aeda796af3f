"""What the commands print when they are done."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from teamtr_lora.cli.text.tables import known, print_table
from teamtr_lora.common.consoles import Console
from teamtr_lora.common.program import program
from teamtr_lora.common.quantities import duration
from teamtr_lora.rollout.collector import Progress as ProgressCall

if TYPE_CHECKING:  # what trains takes seconds to import, and `ask` needs none of it
    from teamtr_lora.study.expected_time import ExpectedTime
    from teamtr_lora.study.plan import Plan
    from teamtr_lora.study.shares import Share
    from teamtr_lora.training.trainer import TrainSummary


def print_next_steps(console: Console, summary: TrainSummary, example: str, *, own_task: bool) -> None:
    """`own_task`: the run's user has a recipe with a task of his own already, and needs none to start from."""
    console.print()
    measured = f"on {summary.episodes_evaluated} episodes" if summary.episodes_evaluated else "(this team was not evaluated)"
    before, after = (known(accuracy, ".3f") for accuracy in (summary.accuracy_before, summary.accuracy_after))
    rewards = " -> ".join(known(reward, ".3f") for reward in (summary.reward_before, summary.reward_after))
    console.print(
        f"[bold]held-out accuracy {before} -> {after}, mean reward {rewards}[/] {measured}, in {duration(summary.seconds)}"
    )
    console.print(
        f"{summary.updates} updates: {summary.accepted} accepted ({summary.shrunk} of them shrunk), {summary.rejected} rejected, "
        f"{summary.skipped} skipped; accepted outside the trust region by their own bounds: {summary.out_of_region_accepted}"
    )
    nothing = summary.updates > 0 and summary.skipped == summary.updates
    if nothing:
        console.print(
            "[yellow]nothing was learned: in too many groups all episodes earned the same, so none was better than another; the "
            f"warnings above say what to change, {escape(summary.run_dir)}/episodes has every transcript[/]"
        )
    run = shlex.quote(summary.run_dir)
    console.print(f"run directory: {escape(summary.run_dir)}\n\nnext:")
    typed = program()
    folder = shlex.quote(str(Path(summary.run_dir).parent))
    view = "view" if folder == "runs" else f"view {folder}"
    learned = [f"ask {run} {shlex.quote(example)}", view, f"report {run}", f"eval {run} --k 4"]
    lines = [f"diagnose {run}", view, f"report {run}"] if nothing else learned
    if not own_task and not Path("my-team").exists():
        lines.append("init my-team")
    for line in lines:
        console.print(f"  {typed} {escape(line)}", soft_wrap=True)  # a command that wraps cannot be copied


def print_transcript(record: dict[str, Any]) -> None:
    """An episode as it is written down in a run's episodes/."""
    console = Console()
    console.print(f"[bold]question[/]\n{escape(record['prompt'])}")
    for message in record["messages"]:
        cut = " [yellow](cut off by the token limit)[/]" if message["finish"] == "length" else ""
        console.print(f"\n[bold]{message['agent']}[/] [dim]{message['version']}, {message['tokens']} tokens[/]{cut}")
        console.print(escape(message["text"]))
    if record["ended"] == "overflow":
        console.print("\n[yellow]the context was full: nobody else could speak (team.protocol.context_tokens)[/]")
    last = [message["text"].strip() for message in record["messages"]][1:][-1:]  # of several; one need not be pointed at
    answer = "its last message" if [record["answer"]] == last else escape(record["answer"])
    console.print(f"\n[bold]the team's answer: {answer}[/]")


def print_plan(plan: Plan) -> None:
    console = Console()
    for title, rows in _plan_tables(plan).items():
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for name, value in rows:
            table.add_row(escape(name), escape(value))
        print_table(console, table)
    if plan.expected_time is None:
        console.print("Expected time: not known; --calibrate measures it by a short run here, --from RUN takes an earlier run's.")
    else:
        console.print(f"Expected time: by {escape(plan.expected_time.source)}, for messages of "
                      f"{plan.expected_time.tokens_per_message:.0f} tokens as there.")  # fmt: skip
    if plan.unmeasured:
        console.print(f"Such a run will not measure {escape('; '.join(plan.unmeasured))}.")
    console.print(plan.trust_region)
    console.print(plan.engine)
    if plan.prompt_tokens >= plan.context_tokens:
        console.print(
            f"This will not run: a first message's prompt has {plan.prompt_tokens:,} tokens, and the context "
            f"{plan.context_tokens:,}. Shorten the items, raise team.protocol.context_tokens if the base allows more, or take "
            "another base."
        )
    if not plan.fits:
        console.print(
            f"This will not fit: with what the allocator adds it may take {_size(plan.with_margin_bytes)}, and the GPU has "
            f"{_size(plan.device_bytes or 0)}. Set training.gradient_checkpointing=true, lower training.tokens_per_microbatch or "
            "rollout.vllm.memory_share, or set rollout.vllm.offload=always."
        )


def _plan_tables(plan: Plan) -> dict[str, list[tuple[str, str]]]:
    return {
        "base": [(plan.base, f"{plan.parameters / 1e6:,.1f}M parameters, {plan.precision} on {plan.device}")],
        "each stage": [
            ("updates", f"{plan.updates_per_stage}"),
            (
                "episodes (rollouts x episodes)",
                f"{plan.episodes_per_stage:,} = {plan.rollouts_per_stage} x {plan.episodes_per_update:,}",
            ),
            ("messages per episode, at most", f"{plan.messages_per_episode}"),
            ("prompt tokens of a first message", f"{plan.prompt_tokens:,}"),
            ("sampled tokens, at most", f"{plan.sampled_tokens_per_stage_at_most:,}"),
        ],
        "the run": [
            ("stages", f"{plan.stages}"),
            ("updates", f"{plan.stages * plan.updates_per_stage:,}"),
            ("sampled tokens, at most", f"{plan.stages * plan.sampled_tokens_per_stage_at_most:,}"),
            ("episodes of one evaluation", f"{plan.evaluation_episodes:,}"),
        ],
        "adapters (float32)": [
            (agent, f"{count:,} parameters, {_size(plan.adapter_bytes[agent])}")
            for agent, count in plan.adapter_parameters.items()
        ],
        **({"time, expected": _times(plan.expected_time)} if plan.expected_time else {}),
        **({f"each of {plan.share.processes} processes": _share_rows(plan.share)} if plan.share else {}),
        f"memory{' of each' if plan.share else ''}, estimated": [
            *((name, _size(size)) for name, size in plan.memory_bytes.items()),
            ("peak", _size(plan.memory_total_bytes)),
            ("with tokens per micro-batch", f"{plan.tokens_per_microbatch:,}"),
        ],
    }


def _share_rows(share: Share) -> list[tuple[str, str]]:
    where = f"{share.processes // share.nodes} on each of {share.nodes} hosts" if share.nodes > 1 else "all on one host"
    has = "its part of every layer of the base" if share.split_base else "the whole base"
    return [
        ("where", where),
        ("has", has + (f", and {share.gpus} GPUs to sample on" if share.gpus > 1 else "")),
        ("items of a rollout, at most", f"{share.items:,} ({share.episodes:,} episodes)"),
        ("micro-batches of a pass, at most", f"{share.microbatches:,} of {share.all_microbatches:,}"),
        ("waits, with equal items and micro-batches", ", ".join(f"{phase} {idle:.0%}" for phase, idle in share.idle.items())),
        *((f"sends for an update: {what}", _size(size)) for what, size in share.sent_bytes.items()),
    ]


def _times(time: ExpectedTime) -> list[tuple[str, str]]:
    return [
        ("a stage", duration(time.stage_seconds)),
        ("of that, rollouts", duration(time.rollouts_seconds)),
        ("of that, updates", duration(time.updates_seconds)),
        ("an evaluation", duration(time.evaluation_seconds)),
        ("the start", duration(time.start_seconds)),
        ("the run", duration(time.run_seconds)),
    ]


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""


@contextmanager
def progress_bar(label: str) -> Iterator[ProgressCall]:
    """A bar on stderr, so that stdout stays what was asked for."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(label, total=None)
        yield lambda done, total, tokens: progress.update(bar, completed=done, total=total)
