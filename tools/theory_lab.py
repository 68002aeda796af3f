"""How the certificates' penalties, and what they bound, grow with the team: exact numbers on random tabular teams.

    .venv/bin/python tools/theory_lab.py [--seeds 40] [--delta 0.01] [--gamma 0.9] [--json FILE]
    .venv/bin/python tools/theory_lab.py --part reuse [--seeds 10] [--json FILE]

The second measures what reusing episodes is worth (reuse_lab.py, reuse_studies.py); it takes some minutes. The rest is the first.

No sampling, no estimation: occupancy, return, advantage and KL are linear solves (tests/algorithm/tabular_lab.py). Every update
is an improving step of KL exactly delta. Per team size, means over seeds, in units of the largest advantage A_max; then
least-squares exponents in log-log with bootstrap intervals over seeds. Over these sizes a sum over n updates has exponent 1, over
the n (n + 1) / 2 terms of thm:stage_stale 1.79, over the n (n - 1) / 2 of its compounding part alone 2.40; those penalties do not
vary between seeds. What they bound does, and is much smaller: it is of second order in the step, the penalties of first.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "algorithm"))
import tabular_lab as lab_  # noqa: E402
from exponents import Exponent, fit_exponent  # noqa: E402
from reuse_studies import run_studies, written  # noqa: E402
from tabular_lab import Array, solve  # noqa: E402

from teamtr_lora.algorithm.certificate import (
    Setting,
    UpdateTerms,
    certify_cached_stage,
    certify_stage,
    certify_stale_stage,
    occupancy_penalty,
    turn_penalty,
)

SIZES = (2, 3, 4, 5, 6, 8)
CONTEXTS, ACTIONS = 4, 3
SPREAD, SCALE = 0.05, 2.0  # transitions and policies sharp enough for a context to remember what was said
ROUNDS = 2  # messages of each agent in an episode
PAPERS_EPISODES = "fresh, gamma = 1 - 1/H"
MEANING = {
    "fresh penalty": "thm:stage: resampled after every update",
    "fresh error": "what it bounds: sum of |gain - L| over the updates",
    "stale penalty": "thm:stage_stale: stage-start occupancy, advantages of the intermediate team",
    "stale error": "what it bounds: sum of |gain - L^stale|",
    "compounding penalty": "the part of the stale penalty that is not the fresh one",
    "stale gap": "what that bounds: sum of |L^seq - L^stale| (Delta_stale)",
    "cached penalty": "stage-start occupancy and advantages, as cached episodes give them: one team step",
    "cached error": "what it bounds: |stage gain - sum of L|",
    PAPERS_EPISODES: f"thm:stage on episodes of H = {ROUNDS} n messages: gamma, too, grows with the team",
    "by turns penalty": "the penalty of the agent's own later messages, same episodes, no discount",
    "by turns error": "what it bounds",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["penalties", "reuse"], default="penalties")
    parser.add_argument("--seeds", type=int, help="default: 40 for penalties, 10 for reuse")
    parser.add_argument("--delta", type=float, default=0.01, help="of penalties only")
    parser.add_argument("--gamma", type=float, default=0.9, help="of penalties only")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    args.seeds = args.seeds if args.seeds is not None else {"penalties": 40, "reuse": 10}[args.part]
    if args.seeds < 2 or args.delta <= 0 or not 0 < args.gamma < 1:
        sys.exit("theory_lab: needs at least two seeds, a positive delta and a gamma between 0 and 1")
    if args.part == "reuse":
        found = run_studies(args.seeds)
        print(written(found))
        if args.json:
            args.json.write_text(json.dumps({"seeds": args.seeds, "studies": found}, indent=2) + "\n")
        return
    readings = measure(args.seeds, args.delta, args.gamma)
    exponents = {name: fit_exponent(SIZES, value_SK) for name, value_SK in readings.items()}
    radii = [args.delta / 4, args.delta / 2, args.delta]
    by_radius = {name: fit_exponent(radii, v) for name, v in measure_radii(args.seeds, radii, args.gamma).items()}
    print(table(readings, exponents, by_radius))
    if args.json:
        args.json.write_text(json.dumps(as_dict(args, readings, exponents, by_radius), indent=2) + "\n")


def measure(seeds: int, delta: float, gamma: float) -> dict[str, Array]:
    """[seed, size] of every row."""
    rows = [[one_team(n, seed, delta, gamma) for n in SIZES] for seed in range(seeds)]
    return {name: np.array([[cell[name] for cell in row] for row in rows]) for name in MEANING}


def measure_radii(seeds: int, radii: list[float], gamma: float) -> dict[str, Array]:
    """[seed, radius] for a team of four: the penalties are of order sqrt(delta), what they bound of order delta."""
    rows = [[continuing(4, seed, delta, gamma) for delta in radii] for seed in range(seeds)]
    return {name: np.array([[cell[name] for cell in row] for row in rows]) for name in rows[0][0]}


def one_team(n: int, seed: int, delta: float, gamma: float) -> dict[str, float]:
    return continuing(n, seed, delta, gamma) | episodic(n, seed, delta)


def continuing(n: int, seed: int, delta: float, gamma: float) -> dict[str, float]:
    rng = np.random.default_rng([seed, n])
    lab = lab_.random_lab(rng, agents=n, contexts=CONTEXTS, actions=ACTIONS, gamma=gamma, spread=SPREAD)
    start_SA = lab_.random_team(rng, lab, SCALE)
    start, order = solve(lab, start_SA), rng.permutation(n).tolist()

    def resampled(team_SA: Array, agent: int) -> Array:
        now = solve(lab, team_SA)
        return lab_.step_to(lab, team_SA, agent, now.advantage_SA, delta, (1 - gamma) * now.visits_S)

    def not_resampled(team_SA: Array, agent: int) -> Array:
        """Ascends what cached episodes show; its length is still delta on the team's own occupancy, as the theorem asks."""
        now = solve(lab, team_SA)
        return lab_.step_to(lab, team_SA, agent, start.advantage_SA, delta, (1 - gamma) * now.visits_S)

    fresh, _ = lab_.run_stage(lab, start_SA, order, resampled)
    stale, _ = lab_.run_stage(lab, start_SA, order, not_resampled)
    largest = max(s.advantage_max for s in [*fresh, *stale])
    setting = Setting(largest, gamma, math.inf)
    compounding = certify_stale_stage([UpdateTerms(s.stale, s.kl) for s in stale], setting)
    values = {
        "fresh penalty": certify_stage([UpdateTerms(s.fresh, s.kl) for s in fresh], setting).penalty,
        "fresh error": math.fsum(abs(s.gain - s.fresh) for s in fresh),
        "stale penalty": compounding.penalty,
        "stale error": math.fsum(abs(s.gain - s.stale) for s in stale),
        "compounding penalty": compounding.staleness,
        "stale gap": math.fsum(abs(s.fresh - s.stale) for s in stale),
        "cached penalty": certify_cached_stage([UpdateTerms(s.cached, s.kl_start) for s in stale], setting).penalty,
        "cached error": abs(math.fsum(s.gain - s.cached for s in stale)),
    }
    return {name: value / largest for name, value in values.items()}


def episodic(n: int, seed: int, delta: float) -> dict[str, float]:
    """Fresh updates in episodes that end, where every agent speaks ROUNDS times; delta is the mean KL of a message."""
    rng = np.random.default_rng([seed, n, 1])
    turns = ROUNDS * n
    lab = lab_.episode_lab(rng, agents=n, turns=turns, contexts=CONTEXTS, actions=ACTIONS, spread=SPREAD)
    discounted = replace(lab, gamma=1 - 1 / turns)
    team_SA = lab_.random_team(rng, lab, SCALE)
    papers = by_turns = error = 0.0
    for agent in rng.permutation(n).tolist():
        now = solve(lab, team_SA)
        new_SA = lab_.step_to(lab, team_SA, agent, now.advantage_SA, delta, now.visits_S / ROUNDS)
        kl = lab_.kl_functional(discounted, solve(discounted, team_SA).visits_S, team_SA, new_SA)
        papers += occupancy_penalty(kl, Setting(1.0, discounted.gamma, 1.0))
        by_turns += turn_penalty(lab_.message_kl(lab, team_SA, new_SA, agent, turns), 1.0)
        gain = solve(lab, new_SA).expected_return - now.expected_return
        gap = abs(gain - lab_.surrogate(now.visits_S, new_SA, now.advantage_SA))
        error += gap / float(np.abs(now.advantage_SA).max())
        team_SA = new_SA
    return {PAPERS_EPISODES: papers, "by turns penalty": by_turns, "by turns error": error}


def table(readings: dict[str, Array], exponents: dict[str, Exponent], by_radius: dict[str, Exponent]) -> str:
    width = max(map(len, readings))
    lines = [f"{'':{width}}" + "".join(f"{f'n = {n}':>10}" for n in SIZES) + f"{'exponent in n':>26}{'in delta':>10}"]
    for name, value_SK in readings.items():
        fit, cells = exponents[name], "".join(f"{v:10.3g}" for v in value_SK.mean(0))
        in_delta = f"{by_radius[name].exponent:10.2f}" if name in by_radius else ""
        lines.append(f"{name:{width}}{cells}{f'{fit.exponent:.2f} [{fit.low:.2f}, {fit.high:.2f}]':>26}{in_delta}")
    return "\n".join([*lines, "", *(f"{name:{width}}  {meaning}" for name, meaning in MEANING.items())])


def as_dict(
    args: argparse.Namespace, readings: dict[str, Array], exponents: dict[str, Exponent], by_radius: dict[str, Exponent]
) -> dict[str, Any]:
    rows = {
        name: {
            "mean": value_SK.mean(0).tolist(),
            "exponent": asdict(exponents[name]),
            "exponent_in_delta": asdict(by_radius[name]) if name in by_radius else None,
            "meaning": MEANING[name],
        }
        for name, value_SK in readings.items()
    }
    return {"sizes": SIZES, "seeds": args.seeds, "delta": args.delta, "gamma": args.gamma, "rows": rows}


if __name__ == "__main__":
    main()
