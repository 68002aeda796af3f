"""metrics.jsonl: one row per update, per stage and per swap. The models below are its documented schema.

What depends on the moment (TIME_FIELDS: times, rates, peak memory) is all that differs between two runs of one recipe on one
CPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import sha256
from teamtr_lora.common.foreign_files import parse_json
from teamtr_lora.runs.diagnostic_rows import ProbeReading, Row, UpdateDiagnostics
from teamtr_lora.runs.layout import MAX_METRICS_BYTES, METRICS, OWN_NAMES, append_synced, read_own, refuse_links

CHECKSUM = "checksum"  # the last field of every row, over all before it: finds damage, and is no signature
TIME_FIELDS = ("seconds", "start_seconds", "tokens_per_second", "idle_share", "time", "peak_memory_bytes", CHECKSUM)
LONGEST = 200  # characters that are said of a damaged row, whose words may be anybody's
_BEFORE = f',"{CHECKSUM}":"'.encode()


class KLReading(Row):
    """One estimator on the held-out messages, in the recipe's reduction; null where it is not finite."""

    mean: float | None = Field(description="over held-out messages, nats per message or per token as trust_region.reduction says")
    standard_error: float | None = Field(description="of the mean, clustered by group; null with one group")
    bound: float | None = Field(
        description="upper confidence bound of the mean, clustered by group; the gate compares it with delta"
    )


class CertificateTerms(Row):
    """What the certificate needs to know of an accepted update, from held-out episodes, in raw reward units."""

    surrogate: float = Field(description="L: mean over episodes of sum (w - 1) * (discounted return - the group's others' mean)")
    surrogate_standard_error: float | None = Field(description="clustered by group")
    surrogate_undiscounted: float = Field(description="the same with undiscounted returns")
    surrogate_undiscounted_standard_error: float | None = Field(description="clustered by group")
    kl: float = Field(description="discounted functional of def:kltok, over all held-out episodes, nats")
    turn_kl: list[float] = Field(
        description="mean KL of the agent's first, second, ... message of an episode, nats; 0 where not reached"
    )
    gamma: float = Field(description="discount per message behind `surrogate` and `kl`: training.discount, auto resolved")
    groups: int = Field(description="held-out groups behind all of it")
    zeta_clip: float = Field(description="app:exp:zeta, in units of the normalised advantage: mean |unclipped - clipped|")
    zeta_ratio: float = Field(
        description="the same units: mean over messages of |advantage| * |w - w clipped to 1 +/- clip_ratio|"
    )
    zeta_norm: float = Field(
        description="the same units: half the mean difference of advantages normalised by either half of their group"
    )
    surrogate_clipped: float = Field(description="L with ratios clipped to 1 +/- clip_ratio (thm:stage-hp)")
    surrogate_clipped_groups: list[float] = Field(
        description="the same of each held-out group, in the order of their items (lem:beta-block)"
    )
    largest_weight: float = Field(
        description="of an episode in these means: held-out groups stand for all, by whether their returns differ"
    )


class _Measure(Row):
    value: float
    standard_error: float | None = None


class _Evaluation(Row):
    """What readers of rows take from an evaluation; it has more, and what a task leaves out is not there."""

    model_config = ConfigDict(extra="allow")

    avg_at_k: float = 0.0
    standard_error: float | None = None
    mean_reward: float = 0.0
    mean_reward_standard_error: float | None = None
    mean_return: float = 0.0
    mean_return_standard_error: float | None = None
    agents: dict[str, _Measure | None] = {}
    coordination: _Measure | None = None
    coordination_given_success: _Measure | None = None
    episodes: int = 0
    by_item: list[float] = []
    items_digest: str = ""


def _checked(evaluation: dict[str, Any]) -> dict[str, Any]:
    _Evaluation.model_validate(evaluation)
    return evaluation


Evaluated = Annotated[dict[str, Any], AfterValidator(_checked)]


class UpdateRow(Row):
    kind: Literal["update"] = Field(default="update", description="which row this is")
    stage: int = Field(description="1-based")
    update: int = Field(description="1-based position in the stage's order")
    agent: str = Field(description="the one that was updated")
    decision: Literal["accepted", "shrunk", "rejected", "skipped"] = Field(description="shrunk: accepted at alpha < 1")
    reason: str = Field(
        default="",
        description="why the whole step was not taken, in words: out of region, no gain or nothing to learn from; else empty",
    )
    version: str = Field(description="the agent's version after the update")
    content_hash: str = Field(description="sha256 of that version's weights and scaling")
    team_versions: dict[str, str] = Field(description="the versions the episodes were sampled from")
    delta: float = Field(description="the radius this update had to stay in")
    alpha: float | None = Field(description="accepted step length; null when nothing was accepted")
    alphas_tried: list[float] = Field(description="step lengths that the gate measured, in order; 1 is the optimizer's own step")
    out_of_region: bool = Field(
        description="accepted with an exact-KL bound above delta, on held-out messages or on those it was fitted to; false by "
        "construction where the exact KL gates"
    )
    kl: dict[str, KLReading] = Field(description="by estimator, at the accepted alpha, else at the one refused")
    kl_message_sum: float | None = Field(description="held-out mean of the message-sum exact KL, nats per message")
    kl_token_mean: float | None = Field(description="held-out mean of each message's exact KL per token, nats")
    kl_discounted: float | None = Field(description="held-out discounted functional of def:kltok, where the agent spoke")
    kl_in_sample: float | None = Field(
        description="exact, nats as `kl`, on the gradient's messages (of many, on 64 or more of them where none is learned from "
        "again), at the accepted alpha; else where optimization stopped"
    )
    kl_bound_in_sample: float | None = Field(
        description="upper bound of kl_in_sample, clustered by group; of an accepted step not above delta where a gate holds; "
        "null where no length was measured there"
    )
    surrogate_gain: float | None = Field(description="held-out surrogate, without clipping, minus the current policy's")
    surrogate_gain_standard_error: float | None = Field(
        description="of surrogate_gain, clustered by group, over the groups that differ in return; null where that is one"
    )
    surrogate_gain_in_sample: float | None = Field(
        description="of the accepted step on the episodes that it was fitted to, those of kl_in_sample"
    )
    learning_rate: float = Field(description="optimizer step size, found by the update where training.learning_rate is auto")
    probing_steps: int = Field(description="optimizer steps taken back because their size was far off")
    window_episodes: int = Field(description="episodes of earlier rollouts that it was given to learn from again")
    log_ratio_max: float | None = Field(description="largest |log message ratio| on held-out messages")
    ratio_clip_rate: float = Field(
        description="share of ratios outside the clip range on the gradient's messages, where kl_in_sample is of"
    )
    gradient_norm: float | None = Field(
        description="of the last optimizer step, before max_grad_norm scales it down; null where not finite"
    )
    gradient_signal: float | None = Field(
        default=None,
        description="share of the first step's squared gradient that other messages would give too, by its micro-batches; the "
        "rest is noise. Below 0 by chance; null with one micro-batch",
    )
    optimizer_steps: int = Field(description="taken in this update; 0 where it was skipped")
    stopped_early: bool = Field(
        description="optimization ended before its last planned step, because the KL had reached its aim or delta"
    )
    beta: float = Field(description="penalty after the update")
    reward_mean: float = Field(description="raw episode reward under the team before this update")
    reward_standard_error: float | None = Field(description="over groups")
    success_rate: float = Field(description="share of the episodes that the task counts as right, 0 to 1")
    advantage_clip_rate: float = Field(
        description="share of the episodes whose |advantage| is above advantage_clip; 0 where none is clipped"
    )
    groups: int = Field(description="of the episodes: one for each item played")
    zero_variance_groups: int = Field(description="of them, those whose episodes all have the same return: no gradient")
    advantage_abs_max: float = Field(description="largest unclipped |advantage|")
    advantage_overflow: float = Field(description="mean |unclipped - clipped advantage|: what clipping took away (lem:clipbias)")
    sampler_gap: dict[str, float] | None = Field(
        description="sampler against trainer log-probabilities: mean_abs, max_abs, message_kl (reduced as the gate's)"
    )
    episodes: int = Field(description="of the newest rollout, which judges the update or a part of it does; see window_episodes")
    fresh_episodes: int = Field(description="of them, sampled for this update: 0 where updates of a stage share a rollout")
    certificate: CertificateTerms | None = Field(description="null where nothing was accepted")
    importance: dict[str, float] | None = Field(
        default=None,
        description="trajectory weights of the episodes that are used again, before they are capped at 4: ess (share of the "
        "episodes), p95, p99, largest, over_ten (share above 10), mean and its standard error; null where none is weighted",
    )
    diagnostics: UpdateDiagnostics | None = Field(default=None, description="null where diagnostics.from_updates is off")
    probe: ProbeReading | None = Field(default=None, description="null in stages that diagnostics.probe_every_stages leaves out")
    messages: int = Field(description="of the updated agent, without those that truncated_messages: mask leaves out")
    truncated_messages: int = Field(description="of the whole team, cut off by the token limit")
    overflowed_episodes: int = Field(description="ended because the transcript had outgrown the context")
    sampled_tokens: int = Field(
        description="of all agents' messages in the episodes, whether sampled for this update or used again"
    )
    trained_tokens: int = Field(description="of the updated agent, per inner epoch")
    seconds: dict[str, float] = Field(
        description="by phase: rollout, optimize, gate, in_sample, publish, saving (what the training waited for since the last "
        "row), diagnostics, probe, transcripts"
    )
    tokens_per_second: float = Field(description="sampled tokens over rollout seconds")
    idle_share: float = Field(
        default=0.0,
        description="share of the time since the last update that a process waited for others, mean over processes; 0 with one",
    )
    time: float = Field(description="Unix time")


class StageRow(Row):
    kind: Literal["stage"] = Field(default="stage", description="which row this is")
    stage: int = Field(description="0 is the team before training")
    order: list[str] = Field(description="agents in the order they were updated")
    versions: dict[str, str] = Field(description="each agent's version after the stage")
    evaluation: Evaluated | None = Field(
        description="Evaluation.as_dict(), and mean_return with its standard error: the rewards discounted by certificate.gamma, "
        "each from the turn that earned it; by_item: each item's accuracy, in order, and items_digest, which is equal where the "
        "problems are; null where evaluation.every_stages skips it"
    )
    floors: dict[str, float] | None = Field(
        description="stage 0: KL floors of the training and gate passes, in the recipe's reduction"
    )
    start_seconds: dict[str, float] | None = Field(
        default=None,
        description="stage 0: what it took to begin, by phase: process (until the base was asked for), base, adapters, engine, "
        "and of the latter vLLM's import and start",
    )
    items_seen: int = Field(
        description="training items that complete stages have taken, this one included; an item taken again counts again"
    )
    updates: int = Field(description="so far, with the counts of their decisions below")
    accepted: int = Field(description="every update that made a new version, shrunk ones included")
    shrunk: int = Field(description="accepted at alpha < 1")
    rejected: int = Field(description="updates of which no step length was acceptable")
    skipped: int = Field(description="updates with too few groups or messages to learn from")
    out_of_region_accepted: int = Field(description="accepted updates whose exact-KL bound was above their delta")
    sampled_tokens: int = Field(description="since the run began: rollouts, evaluations and swaps; probes are not counted")
    seconds: float = Field(description="since the run began, over all its sessions")
    peak_memory_bytes: int = Field(description="of this process so far: allocated on the GPU, or resident on a CPU")
    time: float = Field(description="Unix time")


class SwapRow(Row):
    """An agent was replaced (or a replacement undone) between two stages. The step itself is not certified (prop:pnp)."""

    kind: Literal["swap"] = Field(default="swap", description="which row this is")
    stage: int = Field(description="the last complete stage; updates of a later stage that was in progress begin anew")
    agent: str = Field(description="the one that was replaced")
    how: Literal["stage0", "direct", "undo"] = Field(
        description="stage0: aligned with the old agent first; direct: as it came; undo: the last swap taken back"
    )
    source: str = Field(description="what the new adapter was made from, as the command named it")
    old: str = Field(description="the agent's version before")
    new: str = Field(description="the agent's version afterwards")
    versions: dict[str, str] = Field(description="the team's afterwards")
    delta_align: float | None = Field(default=None, description="the radius of the alignment; null without one")
    kl_before: KLReading | None = Field(default=None, description="KL(old || new) on held-out probe contexts before alignment")
    kl_after: KLReading | None = Field(default=None, description="the same after alignment; both null without one")
    steps: int = Field(default=0, description="of the alignment's optimizer")
    curve: list[tuple[int, float]] = Field(default=[], description="step and held-out mean KL at each check of the alignment")
    evaluation: Evaluated | None = Field(default=None, description="of the team afterwards, as a stage's; null after an undo")
    evaluation_before: Evaluated | None = Field(
        default=None, description="of the team before, on the same items; null after an undo"
    )
    evaluation_direct: Evaluated | None = Field(
        default=None, description="with the new adapter as it came, before its alignment; null where that was not played"
    )
    sampled_tokens: int = Field(default=0, description="of the probe and of all evaluations of the swap")
    trained_tokens: int = Field(
        default=0, description="of the alignment, over all its steps, tokens of contexts included; 0 without one"
    )
    seconds: float = Field(default=0.0, description="of the process that finished the swap; 0 for an undo")
    time: float = Field(description="Unix time")


MetricsRow = UpdateRow | StageRow | SwapRow


class MetricsLog:
    """Appends rows durably. The byte length is part of the checkpoint: rows after it belong to an update that was lost."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, row: MetricsRow) -> None:
        """One row, on the disk when this returns."""
        append_synced(self._path, checksummed(row.model_dump_json().encode()) + b"\n")

    @property
    def size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def truncate(self, size: int) -> None:
        """Drops what was written after the checkpoint that says `size`."""
        if self.size < size:
            raise UserError(f"{self._path}: shorter than the checkpoint says ({self.size} of {size} bytes); the file was altered")
        if self.size > size:
            os.truncate(self._path, size)


def checksummed(row: bytes) -> bytes:
    """A row's JSON with its checksum, which stands in the row itself: a line stays one JSON object."""
    return row.removesuffix(b"}") + _BEFORE + _checksum(row) + b'"}'


def _checksum(row: bytes) -> bytes:
    return sha256(row)[:16].encode()


def _unwrapped(line: bytes) -> bytes:
    """The row without its checksum, which must be there and fit."""
    body, found, rest = line.rpartition(_BEFORE)
    if not found:
        raise ValueError(f"it has no {CHECKSUM}")
    if rest != _checksum(body + b"}") + b'"}':
        raise ValueError(f"it does not match its {CHECKSUM}")
    return body + b"}"


def damaged_rows(run: Path) -> tuple[int, list[tuple[int, str]]]:
    """How many rows a run directory has, and the damaged ones: line and what is wrong."""
    data = read_own(run / METRICS, MAX_METRICS_BYTES) or b""
    lines, damaged = data.split(b"\n")[:-1], []
    for number, line in enumerate(lines, start=1):
        try:
            parse_row(line, "the row")
        except UserError as error:
            damaged.append((number, str(error).removeprefix("the row is ")))
    return len(lines), damaged


def read_rows(run: Path) -> list[MetricsRow]:
    """All rows of a run directory, oldest first. What follows the last line's end is a row that is being written, or was when
    the run was killed: no row yet."""
    path = run / METRICS
    refuse_links(run, OWN_NAMES)
    data = read_own(path, MAX_METRICS_BYTES)
    if data is None:
        raise UserError(f"{path}: missing; give the folder that train printed, once it has evaluated the first team")
    return [parse_row(line, f"{path}: line {number}") for number, line in enumerate(data.split(b"\n")[:-1], start=1)]


def evaluated_as_it_is(rows: Sequence[MetricsRow]) -> list[StageRow | SwapRow]:
    """What was evaluated; where a swap or an undo came last, of the team it left: another one is gone."""
    teams = [row for row in rows if not isinstance(row, UpdateRow)]
    swapped = bool(teams) and isinstance(teams[-1], SwapRow)
    return [row for row in teams if row.evaluation and (not swapped or row.versions == teams[-1].versions)]


def first_and_now(rows: Sequence[MetricsRow]) -> list[dict[str, Any]]:
    """The run's first evaluation, and that of the team as it is, where this is another one."""
    first = next((row for row in rows if not isinstance(row, UpdateRow) and row.evaluation), None)
    found = [] if first is None else [first, *(row for row in evaluated_as_it_is(rows)[-1:] if row is not first)]
    return [row.evaluation for row in found if row.evaluation]


def has_rows(run: Path) -> bool:
    """Whether a run directory has logged anything yet."""
    return (run / METRICS).exists()


def parse_row(line: bytes, where: str) -> MetricsRow:
    """One line of the file; `where` is what an error calls it."""
    try:
        data = parse_json(_unwrapped(line), "the row")
        return _KINDS[data["kind"]].model_validate(data)
    except (UserError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where} is damaged or of another version of teamtr-lora ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    """The first line of pydantic's own text only counts what is wrong."""
    if not isinstance(error, ValidationError):
        return str(error).splitlines()[0]
    first = error.errors()[0]
    return " ".join(f"{'.'.join(map(str, first['loc']))}: {first['msg']}".split())[:LONGEST]


_KINDS: dict[str, type[UpdateRow] | type[StageRow] | type[SwapRow]] = {"update": UpdateRow, "stage": StageRow, "swap": SwapRow}
