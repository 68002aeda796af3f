"""Diagnostics that an update's own numbers give: how the KL is spread, what its monitors are worth, how contexts have drifted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from teamtr_lora.algorithm.occupancy import ContextKey, Excess, MonitorTerms, context_shift, length_bin, subsampled
from teamtr_lora.algorithm.variants.reduction import REDUCTIONS
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json, write_atomic
from teamtr_lora.rollout.sampler import derive_seed
from teamtr_lora.runs.diagnostic_rows import ExcessReading, MonitorReading, SpreadReading, UpdateDiagnostics
from teamtr_lora.runs.layout import read_own_json
from teamtr_lora.tasks import Task
from teamtr_lora.team import Episode
from teamtr_lora.training.gate import CandidateReading

logger = logging.getLogger(__name__)

FRACTIONS = (0.25, 0.5)
REPEATS = 10
LONGEST_ANSWER = 64  # characters of a key; with longer answers all contexts would differ and the file be large
SHIFT_SPLITS = 20  # how often the groups are halved to measure the drift of contexts and its null


@dataclass(frozen=True)
class Contexts:
    """The coarse keys of some episodes' contexts, with the group each belongs to."""

    keys: list[ContextKey]
    group: list[int]


def contexts(episodes: Sequence[Episode], task: Task, round_messages: int = 1) -> Contexts:
    """What each message was an answer to: its turn, its writer, the last answer that it could hear, and how long the text was.
    `round_messages`: so many are heard at once, when the last of them has been said."""
    keys, group = [], []
    for episode in episodes:
        for place, message in enumerate(episode.messages):
            heard = place - place % round_messages
            answer = task.answer(episode.messages[heard - 1].text) if heard else None
            before = answer if answer is None else answer[:LONGEST_ANSWER]
            keys.append(ContextKey(message.turn, message.agent, before, length_bin(len(message.prompt_ids))))
            group.append(episode.group)
    return Contexts(keys, group)


def shift_between(stale: Contexts, fresh: Contexts, seed: int) -> Excess | None:
    """How far the contexts have drifted. None where there are no contexts, or only one group, which cannot be halved."""
    if not stale.keys or not fresh.keys or max(*stale.group, *fresh.group) < 1:
        return None
    keys: tuple[Sequence[Hashable], Sequence[Hashable]] = (stale.keys, fresh.keys)
    return context_shift(keys[0], stale.group, keys[1], fresh.group, splits=SHIFT_SPLITS, seed=seed)


def coupled_difference(one: Sequence[Episode], other: Sequence[Episode], task: Task, round_messages: int = 1) -> float:
    """The share of contexts with another key in the other's play of the same seats; a context that only one reached differs."""
    differ = total = 0
    for first, second in zip(one, other, strict=True):
        ours, theirs = (contexts([played], task, round_messages).keys for played in (first, second))
        total += max(len(ours), len(theirs))
        differ += abs(len(ours) - len(theirs)) + sum(a != b for a, b in zip(ours, theirs, strict=False))
    return differ / total if total else 0.0


class StageContexts:
    """The contexts of a stage's first rollout. They are in a file, because a run that resumes within the stage needs them."""

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self._path, self._writes = path, writes
        self._stage, self._found = 0, Contexts([], [])

    def begin(self, stage: int, found: Contexts) -> None:
        self._stage, self._found = stage, found
        if not self._writes:
            return
        counts = Counter(zip(found.keys, found.group, strict=True))
        rows = [[*key, group, count] for (key, group), count in counts.items()]
        write_atomic(self._path, dump_json({"stage": stage, "contexts": rows}))

    def of(self, stage: int) -> Contexts | None:
        """The contexts of that stage's first rollout. None where the file is gone or damaged: then the drift of this stage is not
        measured, and nothing else is affected."""
        if self._stage != stage and self._path.is_file():
            try:
                body = read_own_json(self._path) or {}
                rows = [(ContextKey(*row[:4]), int(row[4])) for row in body["contexts"] for _ in range(row[5])]
            except (UserError, ValueError, KeyError, TypeError, IndexError) as error:
                logger.warning("%s is damaged (%s): the drift of contexts in this stage is not measured", self._path, error)
                return None
            self._stage, self._found = body["stage"], Contexts([key for key, _ in rows], [group for _, group in rows])
        return self._found if self._stage == stage else None


def update_diagnostics(
    reading: CandidateReading | None, delta: float, *, reduction: str, shift: Excess | None, seed: int
) -> UpdateDiagnostics:
    """Diagnostics from `reading`, the one that the update's row reports; it is None for an update that was skipped."""
    moved = None if shift is None else ExcessReading(value=shift.value, null=shift.null)
    if reading is None or not bool(reading.kl_M.isfinite().all()):
        return UpdateDiagnostics(kl_messages=None, kl_groups=None, messages_over_delta=None, monitor={}, context_shift=moved)
    kl_M, group_M = reading.kl_M.double().numpy(), reading.group_M.numpy()
    _, index_M = np.unique(group_M, return_inverse=True)
    return UpdateDiagnostics(
        kl_messages=_spread(kl_M),
        kl_groups=_spread(np.bincount(index_M, weights=kl_M) / np.bincount(index_M)),
        messages_over_delta=float((kl_M > delta).mean()) if REDUCTIONS[reduction].whole else None,
        monitor=_monitors(reading, delta, seed),
        context_shift=moved,
    )


def _spread(values: np.ndarray) -> SpreadReading:
    p50, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99]).tolist()
    return SpreadReading(p50=p50, p90=p90, p99=p99, largest=float(values.max()))


def _monitors(reading: CandidateReading, delta: float, seed: int) -> dict[str, dict[str, MonitorReading]]:
    found: dict[str, dict[str, MonitorReading]] = {}
    for name, terms_N in reading.terms_N.items():
        if not bool(terms_N.isfinite().all()):
            continue
        terms = MonitorTerms(terms_N.double().numpy(), reading.kl_M.numel(), delta)
        parts = {f"{share:.0%}".rstrip("%"): subsampled(terms, share, REPEATS, derive_seed(seed, share)) for share in FRACTIONS}
        found[name] = {
            share: MonitorReading(deviations=[float(f"{d:.4g}") for d in part.deviations], flips=part.flips)
            for share, part in parts.items()
        }
    return found
