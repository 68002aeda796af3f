"""A run that nobody trained: numbers that look like one's, written by the run directory's own writer."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.recipe import Recipe
from teamtr_lora.runs.diagnostic_rows import (
    ExcessReading,
    GapReading,
    MonitorReading,
    ProbeReading,
    SpreadReading,
    TokenShiftReading,
    UpdateDiagnostics,
)
from teamtr_lora.runs.metrics import CertificateTerms, KLReading, StageRow, SwapRow, UpdateRow, checksummed
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.runs.run_state import COUNTS, RunState
from teamtr_lora.runs.transcripts import EpisodeMarks, TokenMarks
from teamtr_lora.team import Episode, Message

AGENTS = ("planner", "solver", "checker")
ITEMS, GROUPS, GROUP = 128, 8, 8
MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)> & </script>"


def make_run(
    folder: Path,
    updates: int,
    *,
    seed: int = 0,
    delta: float = 0.02,
    probed: bool = True,
    episodes_every: int = 1,
    swap: bool = False,
    say: str = "",
) -> Path:
    """A run as training leaves it, with numbers that look like one; `say` is what its agents say beside sums."""
    draw, run = random.Random(seed), RunDir(folder)
    team = {"agents": [{"name": name} for name in AGENTS], "protocol": {"system": "Add by columns."}}
    settings: dict[str, Any] = {"team": team, "base": {"source": "nano"}, "task": {"name": "column_sum"}, "seed": seed}
    settings |= {"training": {"stages": max(1, math.ceil(updates / 3))}, "trust_region": {"delta": delta}}
    run.claim(Recipe.model_validate(settings).placed_in(folder), {}).release()
    versions = {name: AdapterVersion(name, 0, "0" * 64) for name in AGENTS}
    run.write_team(versions, {})
    state = RunState(step=1, started=True, versions=versions, accuracy_before=0.48, counts=dict.fromkeys(COUNTS, 0))
    clock = 1.7e9
    run.metrics.append(_stage(state, 0, draw, clock))
    for number in range(updates):
        stage, place = number // 3 + 1, number % 3
        row = _update(draw, stage, place, delta=delta, progress=number / updates, probed=probed, clock=clock)
        clock += 30
        _count(state, row)
        run.metrics.append(row)
        if number % episodes_every == 0:
            episodes, marks = _episodes(draw, row, say)
            run.write_episodes(f"stage-{stage:04d}-update-{place + 1}-{row.agent}", episodes, "all", marks)
        if place == 2:
            state.stage, clock = stage, clock + 10
            run.metrics.append(_stage(state, stage, draw, clock))
    if swap:
        run.metrics.append(_swap(state, draw, clock))
    state.accuracy_after, state.metrics_bytes = 0.48 + 0.4 * (1 - math.exp(-3)), run.metrics.size
    run.checkpoints.save(state, {})
    return folder


def _count(state: RunState, row: UpdateRow) -> None:
    state.counts["updates"] += 1
    state.counts["accepted"] += row.alpha is not None
    state.sampled_tokens += row.sampled_tokens
    state.seconds += 30
    if row.decision in ("shrunk", "rejected", "skipped"):
        state.counts[row.decision] += 1


def _evaluation(draw: random.Random, right: float) -> dict[str, Any]:
    by_item = [float((place * 7919) % ITEMS / ITEMS < right - 0.05 or draw.random() < 0.1) for place in range(ITEMS)]
    mean = sum(by_item) / ITEMS
    error = math.sqrt(mean * (1 - mean) / ITEMS)
    measure = {"value": mean, "standard_error": error}
    alone = {name: {"value": min(1.0, mean + 0.1 + 0.05 * i), "standard_error": error} for i, name in enumerate(AGENTS)}
    return {
        "split": "test", "items": ITEMS, "k": 1, "episodes": ITEMS, "temperature": 1.0, "avg_at_k": mean, "standard_error": error,
        "pass_at_k": mean, "pass_at_k_standard_error": error, "mean_reward": mean, "mean_reward_standard_error": error,
        "agents": alone, "coordination": measure, "coordination_given_success": measure, "sampled_tokens": 3000,
        "mean_return": mean * 4 / 9, "mean_return_standard_error": error * 4 / 9, "by_item": by_item, "items_digest": "0" * 16,
    }  # fmt: skip


def _stage(state: RunState, stage: int, draw: random.Random, clock: float) -> StageRow:
    return StageRow(
        stage=stage,
        order=list(AGENTS) if stage else [],
        versions=dict.fromkeys(AGENTS, "v0000-000000000000"),
        evaluation=_evaluation(draw, 0.48 + 0.4 * (1 - math.exp(-stage / 20))),
        floors={"training": 1e-9, "gate": 1e-9} if not stage else None,
        items_seen=GROUPS * stage,
        **state.counts,
        sampled_tokens=state.sampled_tokens,
        seconds=state.seconds,
        peak_memory_bytes=2**30,
        time=clock,
    )


def _update(
    draw: random.Random, stage: int, place: int, *, delta: float, progress: float, probed: bool, clock: float
) -> UpdateRow:
    decision = draw.choices(("accepted", "shrunk", "rejected", "skipped"), (60, 25, 10, 5))[0]
    taken, agent = decision in ("accepted", "shrunk"), AGENTS[(place + stage) % 3]
    mean = delta * draw.uniform(0.1, 0.7) * (1 if taken else 2.5)
    reading = KLReading(mean=mean, standard_error=mean / 8, bound=mean * 1.25)
    gain = draw.gauss(0.03, 0.01) if taken else -abs(draw.gauss(0.0, 0.005))
    skipped = decision == "skipped"
    return UpdateRow(
        stage=stage, update=place + 1, agent=agent, decision=decision, version=f"v{stage:04d}-000000000000",
        content_hash="0" * 64,
        reason={"accepted": "", "shrunk": "the whole step was out of region: KL bound 0.0310 above 0.02",
                "rejected": "no gain: -0.0041 ± 0.0037 on held-out items",
                "skipped": "nothing to learn from: in 8 of 8 new groups all episodes earned agent it the same"}[decision],
        team_versions=dict.fromkeys(AGENTS, "v0000-000000000000"), delta=delta,
        alpha={"accepted": 1.0, "shrunk": round(draw.uniform(0.2, 0.9), 2)}.get(decision), alphas_tried=[] if skipped else [1.0],
        out_of_region=False, kl={} if skipped else {"exact": reading, "k3": reading, "k1": reading},
        kl_message_sum=None if skipped else mean, kl_token_mean=None if skipped else mean / 9, kl_discounted=mean,
        kl_in_sample=mean, kl_bound_in_sample=mean, surrogate_gain=None if skipped else gain, surrogate_gain_standard_error=0.004,
        surrogate_gain_in_sample=gain if taken else None, learning_rate=2e-3, probing_steps=0, window_episodes=0,
        log_ratio_max=0.4, ratio_clip_rate=0.05, gradient_norm=0.3, gradient_signal=0.4, optimizer_steps=3,
        stopped_early=False, beta=0.0,
        reward_mean=min(1.0, max(0.0, 0.48 + 0.4 * (1 - math.exp(-3 * progress)) + draw.gauss(0, 0.03))),
        reward_standard_error=0.03, success_rate=0.5, advantage_clip_rate=0.0, groups=GROUPS, zero_variance_groups=1,
        advantage_abs_max=2.0, advantage_overflow=0.0, sampler_gap=None, episodes=GROUPS * GROUP, fresh_episodes=GROUPS * GROUP,
        certificate=_certificate(draw, mean, gain) if taken else None,
        diagnostics=_diagnostics(draw, mean, place) if not skipped else None,
        probe=_probe(draw, place, taken) if probed and stage % 10 in (1, 2) else None,
        messages=GROUPS * GROUP, truncated_messages=0, overflowed_episodes=0, sampled_tokens=1500, trained_tokens=900,
        seconds={"rollout": draw.uniform(6, 9), "optimize": draw.uniform(9, 12), "gate": 1.5, "publish": 0.05, "probe": 0.4},
        tokens_per_second=draw.uniform(150, 250), time=clock + 25,
    )  # fmt: skip


def _certificate(draw: random.Random, kl: float, gain: float) -> CertificateTerms:
    return CertificateTerms(
        surrogate=gain * 0.4, surrogate_standard_error=0.003, surrogate_undiscounted=gain,
        surrogate_undiscounted_standard_error=0.006,
        kl=kl / 3, turn_kl=[kl], gamma=2 / 3, groups=GROUPS, zeta_clip=0.0, zeta_ratio=0.01, zeta_norm=0.02,
        surrogate_clipped=gain * 0.4, surrogate_clipped_groups=[gain * 0.4] * 4, largest_weight=1.0,
    )  # fmt: skip


def _diagnostics(draw: random.Random, kl: float, place: int) -> UpdateDiagnostics:
    spread = SpreadReading(p50=kl / 2, p90=kl * 2, p99=kl * 4, largest=kl * draw.uniform(5, 9))
    monitor = {"exact": {"25": MonitorReading(deviations=[0.1] * 20, flips=1)}}
    shift = ExcessReading(value=0.31, null=0.30) if place else None
    return UpdateDiagnostics(kl_messages=spread, kl_groups=spread, messages_over_delta=0.1, monitor=monitor, context_shift=shift)


def _probe(draw: random.Random, place: int, taken: bool) -> ProbeReading:
    gap = GapReading(value=0.03, null=0.025, signed=0.004, standard_error=0.01, stale=0.03, fresh=0.026)
    before = [0.7, 0.15, 0.08, 0.04, 0.03]
    shifts = {
        name: TokenShiftReading(
            step=step, before=before, after=before, moved=[m * step / 20 for m in before], flip_rate=step / 100
        )
        for name, step in (("in_region", 1.0), ("out_of_region", 4.0))
    }
    return ProbeReading(
        episodes=64, tokens=1500, gap=gap if taken else None, context_shift=ExcessReading(value=0.3, null=0.28, coupled=0.05),
        weights={"ess": 1 - 0.05 * place, "p95": 1.1, "p99": 1.3, "largest": 1.6, "over_ten": 0.0, "mean": 1.0,
                 "mean_standard_error": 0.01},
        token_shift=shifts if taken else None, fisher=None,
    )  # fmt: skip


def _swap(state: RunState, draw: random.Random, clock: float) -> SwapRow:
    readings = [KLReading(mean=mean, standard_error=mean / 10, bound=mean * 1.2) for mean in (1.5, 0.008)]
    return SwapRow(
        stage=state.stage, agent="solver", how="stage0", source="fresh", old="v0000-000000000000", new="v0001-000000000000",
        versions=dict.fromkeys(AGENTS, "v0000-000000000000"), delta_align=0.01, kl_before=readings[0], kl_after=readings[1],
        steps=60, curve=[(step, 1.5 * math.exp(-step / 11)) for step in range(0, 61, 10)], evaluation=_evaluation(draw, 0.86),
        evaluation_before=_evaluation(draw, 0.87), evaluation_direct=_evaluation(draw, 0.7), time=clock,
    )  # fmt: skip


def _episodes(draw: random.Random, row: UpdateRow, say: str) -> tuple[list[Episode], list[EpisodeMarks]]:
    episodes, marks = [], []
    for group in range(GROUPS):
        first, second = draw.randrange(100, 500), draw.randrange(100, 500)
        for _ in range(GROUP):
            episode = Episode(f"train:{first}+{second}", group, f"{first}+{second}", seed=0)
            for turn, name in enumerate(AGENTS):
                text = f"{first}+{second}={first + second + draw.randrange(2)} {say}".strip()
                ids = list(range(len(text)))
                episode.messages.append(Message(name, turn, [0] * 40, ids, [-0.1] * len(ids), "v0000-000000000000", "stop", text))
            episode.feedback, episode.success = [None] * 3, bool(draw.random() < 0.6)
            episode.rewards, episode.answer_turn = [0.0, 0.0, float(episode.success)], 2
            episodes.append(episode)
            marks.append(EpisodeMarks(draw.gauss(0, 1), _marks(draw, episode, row) if group < 2 else {}))
    return episodes, marks


def _marks(draw: random.Random, episode: Episode, row: UpdateRow) -> dict[int, TokenMarks]:
    found = {}
    for turn, message in enumerate(episode.messages):
        logprobs = [round(-draw.expovariate(4), 3) for _ in message.text]
        change = [round(draw.gauss(0, 0.1), 3) for _ in message.text] if message.agent == row.agent and row.alpha else None
        found[turn] = TokenMarks(list(message.text), logprobs, change)
    return found


def plain_rows(run: Path) -> list[dict[str, Any]]:
    """The rows of a run without their checksums, to write other ones."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if key != "checksum"} for row in rows]


def write_rows(run: Path, rows: list[dict[str, Any]]) -> None:
    (run / "metrics.jsonl").write_bytes(b"".join(checksummed(json.dumps(row).encode()) + b"\n" for row in rows))
