"""What `certify` prints."""

from __future__ import annotations

import math

from rich import box
from rich.console import Console
from rich.table import Table

from teamtr_lora.algorithm.certificate import Calibration
from teamtr_lora.training.certify import RunCertificates, StageCertificate


def print_certificates(run: RunCertificates) -> None:
    title = f"certificates in raw reward, discounted by gamma = {run.gamma:.4g}; A_max = {run.advantage_bound:g}"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    certain = f"at {run.confidence:.0%}"
    for name in ("stage", "L", "penalty", "bound", certain, "vacuous", "gain", "error", "slack"):
        table.add_column(name, justify="right", overflow="fold")
    for s in run.stages:
        shown = (s.certificate.surrogate, s.certificate.penalty, s.certificate.bound, s.high_probability.bound)
        measured = (s.return_improvement, s.return_improvement_standard_error, s.slack)
        vacuous = "yes" if s.certificate.vacuous else "no"
        table.add_row(str(s.stage), *map(_number, shown), vacuous, *map(_number, measured))
    console = Console()
    console.print(table)
    console.print(_legend(run, certain))
    for s in run.stages:
        console.print(f"stage {s.stage} ({s.theorem}): {_penalties(s)}")
    if any(s.by_turns for s in run.stages):
        console.print(_by_turns(run))
    for s in run.stages:
        if s.achievable:
            console.print(
                f"stage {s.stage}: some update in each trust region gains {s.achievable.surrogate:+.4f} (thm:info-lower-stage), "
                f"which certifies {s.achievable.bound:+.4f}"
            )
    for r in run.replacements:
        found = "" if r.change is None else f"; measured {r.change:+.4f} ± {r.change_standard_error or 0:.4f}"
        what = f"{r.agent} was replaced ({r.how}): {r.old} -> {r.new}"
        console.print(f"after stage {r.after_stage} {what}; not certified{found}")
    for name, calibration in (("bound", run.calibration), ("by turns", run.by_turns_calibration)):
        if calibration:
            console.print(f"{name}{run.since and ', ' + run.since}: {_words(calibration)}")
    if run.since and not run.calibration:
        console.print(f"bound: no stage {run.since} has a measured improvement")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+.4f}"


def _legend(run: RunCertificates, certain: str) -> str:
    words = (
        f"bound = L - penalty; {certain}: with the sampling error of L charged too, by its standard error. A bound of "
        f"-{run.return_range:.4g} or less is vacuous: nothing is excluded."
    )
    if all(s.improvement is None for s in run.stages):
        words += " No stage was evaluated at both of its ends, so no gain is known; train with evaluation.every_stages=1."
    elif run.gamma < 1:
        words += " gain: measured mean discounted return, after less before"
        words += "." if run.end_discount is None else f"; every reward counts {run.end_discount:.4g}."
        if any(s.return_improvement is None and s.improvement is not None for s in run.stages):
            words += (
                " A gain is not known (-) where this run, of an older version, has only mean rewards: its episodes end at "
                "different turns, so that they cannot be discounted; --json has the gain in mean reward (improvement)."
            )
    return words


def _penalties(s: StageCertificate) -> str:
    """Each penalty of the bound at the confidence, with its share."""
    if s.high_probability.penalty == math.inf:
        return "penalties are infinite without a discount: only the bounds by turns say something"
    shares = s.high_probability.shares()
    found = [
        f"{name.replace('_', ' ')} {getattr(s.high_probability, name):.4f} ({part:.0%})" for name, part in shares.items() if part
    ]
    words = f"penalties {', '.join(found) or 'none: nothing moved'}"
    if s.distribution_free is not None:
        words += f"; without assuming a distribution (thm:stage-hp) the bound is {s.distribution_free.bound:+.4f}"
    if s.stale is not None:
        words += f"; thm:stage_stale would charge {s.stale.penalty:.4f}, {s.stale.staleness:.4f} of it for staleness"
    return words


def _by_turns(run: RunCertificates) -> Table:
    title = "the same by turns: undiscounted, charged only for an agent's own later messages, with its sampling error"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("stage", "L", "shift", "noise", "bound", "vacuous", "gain", "error", "slack"):
        table.add_column(name, justify="right", overflow="fold")
    for s in run.stages:
        if s.by_turns:
            terms = (s.by_turns.surrogate, s.by_turns.occupancy, s.by_turns.concentration, s.by_turns.bound)
            measured = (s.improvement, s.improvement_standard_error, s.by_turns_slack)
            table.add_row(str(s.stage), *map(_number, terms), "yes" if s.by_turns.vacuous else "no", *map(_number, measured))
    return table


def _words(c: Calibration) -> str:
    correlation = "-" if c.rank_correlation is None else f"{c.rank_correlation:+.2f}"
    shares = ", ".join(f"{name} {share:.0%}" for name, share in c.penalty_shares.items() if share)
    stages = "1 stage" if c.rows == 1 else f"{c.rows} stages"
    return (
        f"{stages} with a measured improvement; vacuous {c.vacuous_rate:.0%}, could certify {c.can_certify_rate:.0%}, "
        f"violated {c.violation_rate:.0%} ({c.significant_violation_rate:.0%} beyond the noise of the measurement); mean slack "
        f"{c.mean_slack:.4f}; rank correlation {correlation}; penalties: {shares or 'none'}"
    )
