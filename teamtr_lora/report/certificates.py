"""What `certify` prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from teamtr_lora.algorithm.certificate import Calibration
from teamtr_lora.training.certify import RunCertificates


def print_certificates(run: RunCertificates) -> None:
    table = Table(title=f"certificates in raw reward, gamma = {run.gamma:.4g}")
    columns = (
        "stage",
        "surrogate",
        "occupancy penalty",
        "bound",
        f"bound at {run.confidence:.0%}",
        "vacuous",
        "by turns",
        "measured",
    )
    for name in columns:
        table.add_column(name, justify="right")
    for s in run.stages:
        table.add_row(
            str(s.stage),
            f"{s.certificate.surrogate:+.4f}",
            f"{s.certificate.occupancy + s.certificate.staleness:.4f}",
            f"{s.certificate.bound:+.4f}",
            f"{s.high_probability.bound:+.4f}",
            "yes" if s.certificate.vacuous else "no",
            "-" if s.by_turns is None else f"{s.by_turns.bound:+.4f}",
            "-" if s.improvement is None else f"{s.improvement:+.4f} +/- {s.improvement_standard_error or 0:.4f}",
        )
    console = Console()
    console.print(table)
    if run.stages:
        console.print(f"bounded by {run.stages[0].theorem}; `by turns` is the undiscounted form, with its sampling error charged")
    for s in run.stages:
        if s.achievable:
            console.print(
                f"stage {s.stage}: some update in each trust region gains {s.achievable.surrogate:+.4f} (thm:info-lower-stage), "
                f"which certifies {s.achievable.bound:+.4f}"
            )
    for r in run.replacements:
        measured = "" if r.change is None else f"; measured {r.change:+.4f} +/- {r.change_standard_error or 0:.4f}"
        what = f"{r.agent} was replaced ({r.how}): {r.old} -> {r.new}"
        console.print(f"after stage {r.after_stage} {what}; not certified{measured}")
    for name, calibration in (("bound", run.calibration), ("by turns", run.by_turns_calibration)):
        if calibration:
            console.print(f"{name}: {_words(calibration)}")


def _words(c: Calibration) -> str:
    correlation = "-" if c.rank_correlation is None else f"{c.rank_correlation:+.2f}"
    shares = ", ".join(f"{name} {share:.0%}" for name, share in c.penalty_shares.items() if share)
    return (
        f"{c.rows} stages with a measured improvement; vacuous {c.vacuous_rate:.0%}, could certify {c.can_certify_rate:.0%}, "
        f"violated {c.violation_rate:.0%}; mean slack {c.mean_slack:.4f}; rank correlation {correlation}; "
        f"penalties: {shares or 'none'}"
    )
