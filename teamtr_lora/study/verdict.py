"""What `certify` and `diagnose` say first: a verdict in plain words, and what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from teamtr_lora.runs.metrics import UpdateRow
from teamtr_lora.study.certified import RunCertificates, StageCertificate

MUCH = 0.1  # of the episodes: beyond this a limit is what to change first
IDLE = 0.02  # of the radius: a step of a smaller KL is less than a seventh as long as the region allows
WIDE = 3.0  # times the mean KL: a bound beyond this is mostly noise, and a shorter step hardly lowers it

NEVER_RIGHT = (
    "Next: no held-out episode was right: read the transcripts of `report`, and give the team easier items or a reward that "
    "grows in small steps; or change what counts as right (for a dataset: task.success_at_least)."
)
NOTHING = "Next: nothing stands out; the tables below say how each part did, and what is missing says which setting measures it."


def certify_verdict(run: RunCertificates, items: int) -> list[str]:
    """`items`: of a stage, as the recipe says. The bound by turns counts where there is one; never the better of two,
    which would hold less often than either."""
    best = [s.by_turns or s.high_probability for s in run.stages]
    proven = [s.stage for s, bound in zip(run.stages, best, strict=True) if bound.bound > 0]
    vacuous = sum(bound.vacuous for bound in best)
    certain, stages = f"{run.confidence:.0%}", _count(len(run.stages), "stage")
    which = "; by the bound by turns" if any(s.by_turns for s in run.stages) else ""
    if proven:
        named = f"stage{'s' if len(proven) > 1 else ''} {', '.join(map(str, proven))}{which}"
        words = [f"By its bounds, at {certain} confidence each, the team got better in {len(proven)} of {stages} ({named})."]
    else:
        most = _at_most_lost(run, [s for s, bound in zip(run.stages, best, strict=True) if not bound.vacuous])
        words = [f"By its bounds nothing is sure to have got better in {stages}; at {certain} confidence {most}."]
    if vacuous and vacuous < len(best):
        words.append(f"Vacuous bounds, which exclude nothing: {vacuous}.")
    measured = [s for s in run.stages if s.improvement is not None]
    if measured:
        gain = sum(s.improvement or 0.0 for s in measured)
        compared = run.by_turns_calibration or run.calibration
        below = "; no stage came out below its bound"
        if compared is None:
            below = ""
        elif compared.violation_rate:
            beyond = "beyond" if compared.significant_violation_rate else "within"
            below = f"; some stage came out below its bound, {beyond} the noise"
        words.append(f"Measured on held-out items, mean reward changed by {gain:+.3f} in all those stages{below}.")
    if not measured:
        words.append("Next: evaluation.every_stages=1 measures what each stage gained, to compare with its bound.")
    elif proven:
        words.append("Next: nothing to change; the tables say what each bound is made of.")
    else:
        words.append(
            f"Next: a bound is what the update promises (L) less what it risks; for a positive one raise rollout.items_per_stage "
            f"(now {items}), which lowers the noise, or lower trust_region.delta, which lowers the penalty faster than L."
        )
    return words


def _at_most_lost(run: RunCertificates, stages: Sequence[StageCertificate]) -> str:
    """`stages`: whose bounds exclude something. Those by turns are of the mean reward, the paper's of the discounted return."""
    if not stages:
        return "nothing is excluded"
    end = run.end_discount
    worst = min(s.by_turns.bound if s.by_turns else s.high_probability.bound / (end or 1.0) for s in stages)
    what = "mean reward" if end or all(s.by_turns for s in stages) else "discounted return"
    which = " (by the bound by turns)" if any(s.by_turns for s in stages) else ""
    others = len(run.stages) - len(stages)
    where = f"in the other {_count(len(stages), 'stage')} none can" if others else "no stage can"
    return f"{where} have cost more than {-worst:.3f} of {what}{which}"


def diagnose_verdict(
    updates: Sequence[UpdateRow],
    evaluations: Sequence[dict[str, Any]],
    *,
    fixed_rate: bool,
    rate_falls: bool = False,
    estimator: str = "exact",
) -> list[str]:
    """`evaluations`: the first one, and that of the team as it is. `fixed_rate`: the recipe names a learning rate,
    which may fall by a schedule (`rate_falls`). `estimator`: of the KL that the gate bounds."""
    counts: Counter[str] = Counter(row.decision for row in updates)
    taken = counts["accepted"] + counts["shrunk"]
    words = [
        f"{taken} of {_count(len(updates), 'update')} were accepted ({counts['shrunk']} of them shrunk), {counts['rejected']} "
        f"rejected, {counts['skipped']} skipped."
    ]
    if len(evaluations) > 1:
        first, last = evaluations[0], evaluations[-1]
        noise = 2 * ((first["standard_error"] or 0.0) ** 2 + (last["standard_error"] or 0.0) ** 2) ** 0.5
        rise = last["avg_at_k"] - first["avg_at_k"]
        kind = "a rise" if rise > noise else "a fall" if rise < -noise else "no more than the noise of the evaluations"
        words.append(f"Held-out accuracy went from {first['avg_at_k']:.3f} to {last['avg_at_k']:.3f}: {kind}.")
    step = _next_step(updates, counts, estimator, _a_found_rate(rate_falls) if fixed_rate else "")
    never_right = evaluations and not any(measured["avg_at_k"] for measured in evaluations)
    return [*words, step or (NEVER_RIGHT if never_right else NOTHING)]


def _a_found_rate(falls: bool) -> str:
    return "training.learning_rate=auto" + (" training.schedule=constant" if falls else "")


def _next_step(updates: Sequence[UpdateRow], counts: Counter[str], estimator: str, found_rate: str) -> str | None:
    """`found_rate`: the settings by which the rate is found, empty where it is. None: nothing stands out."""
    half, episodes = len(updates) / 2, sum(row.episodes for row in updates)
    ended, cut = (sum(getattr(row, of) for row in updates) for of in ("overflowed_episodes", "truncated_messages"))
    if ended > MUCH * episodes:
        return (
            f"Next: {ended} of {episodes} episodes ended early because the context was full: raise team.protocol.context_tokens, "
            "or shorten prompts, rounds or rollout.max_message_tokens."
        )
    outside = sum(row.reason.startswith("out of region") for row in updates if row.decision == "rejected")
    if counts["skipped"] > half:
        return (
            "Next: most updates had nothing to learn from, as all tries of an item earned the same: check the reward, raise "
            "rollout.episodes_per_item or rollout.temperature, or take items that are right some of the time."
        )
    if counts["rejected"] > half and 2 * outside > counts["rejected"]:
        shorter = f"set {found_rate}" if found_rate else "raise rollout.items_per_stage, which tightens the bound"
        return f"Next: most steps were out of region: {shorter}, or raise trust_region.delta."
    if counts["rejected"] > half:
        return "Next: most steps gained nothing: raise rollout.items_per_stage, so that the gain stands out from its noise."
    if counts["shrunk"] > half and (width := _bound_by_mean(updates, estimator)) > WIDE:
        return (
            f"Next: most steps were cut because their KL bound is wide ({width:.1f} times the KL itself), not because they were "
            "long: raise rollout.items_per_stage, which tightens the bound."
        )
    if counts["shrunk"] > half and (found_rate or any(row.optimizer_steps > 1 for row in updates)):
        shorter = found_rate or "a lower training.inner_epochs"
        return f"Next: most steps were longer than the region and were cut: {shorter} wastes less of them."
    read = [(row.kl[estimator].mean, row.delta) for row in updates if row.decision == "accepted" and estimator in row.kl]
    idle = sum(kl is not None and kl < IDLE * delta for kl, delta in read)
    if found_rate and idle > len(updates) / 4:
        return (
            f"Next: {idle} steps had a KL of less than {IDLE:.0%} of the radius and hardly moved their agents: raise "
            "training.learning_rate; or end after fewer stages, where it falls (training.schedule=linear)."
        )
    if cut > MUCH * episodes:
        return (
            f"Next: {cut} messages of {episodes} episodes were cut at their token limit: raise rollout.max_message_tokens, or "
            "ask for shorter ones in the roles."
        )
    return None


def _bound_by_mean(updates: Sequence[UpdateRow], estimator: str) -> float:
    """Of the steps that were cut, the median of their KL bound over their mean KL; 0 where none has both."""
    readings = [row.kl[estimator] for row in updates if row.decision == "shrunk" and estimator in row.kl]
    return median([kl.bound / kl.mean for kl in readings if kl.bound is not None and kl.mean] or [0.0])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
