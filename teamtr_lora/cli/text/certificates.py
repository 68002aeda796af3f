"""What `certify` prints."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from teamtr_lora.cli.text.tables import known, print_table, table_of
from teamtr_lora.common.consoles import Console, print_hanging
from teamtr_lora.study.certified import Calibration, Certificate, Certified, RunCertificates, StageCertificate, UpdateCertificate


def print_certificates(run: RunCertificates, *, updates: bool) -> None:
    """Of its stages, or of single updates."""
    rows: Sequence[Certified] = run.updates if updates else run.stages
    title = (
        f"the paper's bound, in raw reward, each message discounted by gamma = {run.gamma:.4g}; no advantage is above "
        f"A_max = {run.advantage_bound:g}"
    )
    certain = f"at {run.confidence:.0%}"
    table = _table(title, "update" if updates else "stage", "L", "penalty", "bound", certain)
    for r in rows:
        bound = r.certificate
        shown = (_signed(bound.surrogate), known(bound.penalty), _signed(bound.bound), _signed(r.high_probability.bound))
        _add(table, r, shown, r.high_probability, (r.return_improvement, r.return_improvement_standard_error, r.slack))
    console = Console()
    for sentence in run.verdict:
        console.print(f"[bold]{escape(sentence)}[/]")
    if any(r.by_turns for r in rows):  # the verdict's, where there is one
        print_table(console, _by_turns(rows))
    print_table(console, table)
    console.print(_legend(run, certain, updates))
    for r in rows:
        print_hanging(console, f"{_what(r)}: {_penalties(r)}")
    if updates:
        _print_calibrations(console, run, run.update_calibration, run.update_by_turns_calibration, "update")
        return
    for s in run.stages:
        if s.achievable:
            console.print(
                f"stage {s.stage}: some update in each trust region gains {s.achievable.surrogate:+.4f} (thm:info-lower-stage), "
                f"which certifies {s.achievable.bound:+.4f}"
            )
    for swap in run.replacements:
        found = "" if swap.change is None else f"; measured {swap.change:+.4f} ± {swap.change_standard_error or 0:.4f}"
        what = f"{swap.agent} was replaced ({swap.how}): {swap.old} -> {swap.new}"
        console.print(f"after stage {swap.after_stage} {what}; not certified{found}")
    _print_calibrations(console, run, run.calibration, run.by_turns_calibration, "stage")


def _print_calibrations(
    console: Console, run: RunCertificates, bound: Calibration | None, by_turns: Calibration | None, unit: str
) -> None:
    for name, calibration in (("bound", bound), ("by turns", by_turns)):
        if calibration:
            console.print(f"{name}{run.since and ', ' + run.since}: {_words(calibration, unit)}")
    if run.since and not bound:
        console.print(f"bound: no {unit} {run.since} has a measured improvement")


def _name(row: Certified) -> str:
    return f"{row.stage}.{row.update}" if isinstance(row, UpdateCertificate) else str(row.stage)


def _what(row: Certified) -> str:
    if isinstance(row, UpdateCertificate):
        return f"{_name(row)} {row.agent}, {row.decision} (thm:single)"
    assert isinstance(row, StageCertificate)
    return f"stage {row.stage} ({row.theorem})"


def _table(title: str, *columns: str) -> Table:
    columns = (*columns, "vacuous", "gain", "error", "slack")
    return table_of(title, *columns, left=0, box=box.SIMPLE, padding=(0, 1, 0, 0))


def _add(table: Table, row: Certified, shown: Sequence[str], bound: Certificate, measured: Sequence[float | None]) -> None:
    gain, error, slack = measured
    table.add_row(_name(row), *shown, "yes" if bound.vacuous else "no", _signed(gain), known(error), _signed(slack))


def _signed(value: float | None) -> str:
    return known(value, "+.4f")


def _legend(run: RunCertificates, certain: str, updates: bool) -> str:
    words = (
        "L: what the updates promise, their surrogate gain on held-out episodes; penalty: what they risk, by how far they moved "
        f"the agents; bound = L - penalty; {certain}: with the sampling error of L charged too, by its standard error. A bound "
        f"of -{run.return_range:.4g} or less is vacuous: nothing is excluded."
    )
    if run.largest_weight is not None:
        words += (
            " Episodes that a stage uses again have trajectory weights, so that L and the KL are of the team just before each "
            f"update; the largest is {run.largest_weight:.3g}."
        )
    if updates:
        words += (
            " gain: mean return of the next update's episodes less that of this one's; a stage's last update has none. These are "
            "the accepted updates that learned from episodes of their own; others are certified with their stage."
        )
    elif all(s.improvement is None for s in run.stages):
        words += (
            " gain, error and slack are empty: no stage was evaluated at both of its ends, as evaluation.every_stages=1 does."
        )
    elif run.gamma < 1:
        words += " gain: measured mean discounted return, after less before, with its error; slack: how far it is above the bound"
        words += "." if run.end_discount is None else f"; every reward counts {run.end_discount:.4g}."
    return words


def _penalties(s: Certified) -> str:
    """Each penalty of the bound at the confidence, with its share."""
    if s.high_probability.occupancy < s.high_probability.concentration == math.inf:
        return "the sampling error of L is not known, with so few held-out items: nothing is sure at a confidence"
    if s.high_probability.penalty == math.inf:
        return "penalties are infinite without a discount: only the bounds by turns say something"
    shares = s.high_probability.shares()
    found = [
        f"{name.replace('_', ' ')} {getattr(s.high_probability, name):.4f} ({part:.0%})" for name, part in shares.items() if part
    ]
    words = f"penalties {', '.join(found) or 'none: nothing moved'}"
    if s.distribution_free is not None:
        words += f"; without assuming a distribution (thm:stage-hp) the bound is {_signed(s.distribution_free.bound)}"
    if isinstance(s, StageCertificate) and s.stale is not None:
        words += f"; thm:stage_stale would charge {s.stale.penalty:.4f}, {s.stale.staleness:.4f} of it for staleness"
    return words


def _by_turns(rows: Sequence[Certified]) -> Table:
    title = "by turns: in raw reward, undiscounted, charged only for an agent's own later messages, with its sampling error"
    first = "update" if isinstance(rows[0], UpdateCertificate) else "stage"
    table = _table(title, first, "L", "shift", "noise", "bound")
    for r in rows:
        if r.by_turns:
            bound = r.by_turns
            shown = (_signed(bound.surrogate), known(bound.occupancy), known(bound.concentration), _signed(bound.bound))
            _add(table, r, shown, bound, (r.improvement, r.improvement_standard_error, r.by_turns_slack))
    return table


def _words(c: Calibration, unit: str) -> str:
    shares = ", ".join(f"{name} {share:.0%}" for name, share in c.penalty_shares.items() if share)
    counted = f"{c.rows} {unit}{'' if c.rows == 1 else 's'}"
    beyond = f"{c.significant_violation_rate:.0%} beyond the noise of the measurement"
    if c.vacuous_rate and c.informative_violation_rate is not None:
        beyond = f"{c.informative_violation_rate:.0%} of those that are not vacuous, {beyond}"
    return (
        f"{counted} with a measured improvement; vacuous {c.vacuous_rate:.0%}, could certify {c.can_certify_rate:.0%}, "
        f"violated {c.violation_rate:.0%} ({beyond}); mean slack {c.mean_slack:.4f}; rank correlation "
        f"{known(c.rank_correlation, '+.2f')}; penalties: {shares or 'none'}"
    )
