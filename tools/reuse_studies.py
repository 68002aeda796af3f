"""The studies of theory_lab.py's `--part reuse`: what learns best at equal messages, and why (see reuse_lab.py).

Shape suffixes as there; replicates of one rollout stand on the axis of seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
from reuse_lab import (
    HOLDOUT,
    VARIANTS,
    Bools,
    Columns,
    Differ,
    Learner,
    Rollout,
    Task,
    Variant,
    gradient,
    log_played,
    log_softmax,
    new_items,
    play,
    signals,
    step,
)
from tabular_lab import Array

from teamtr_lora.training.batches import judging_weights

Rows = dict[str, dict[str, float | None]]
STAGES, REPLICATES = 20, 2000
DELTA = 0.02
GROUPS, GROUP = 12, 3  # of one rollout: 36 episodes


@dataclass(frozen=True)
class Cell:
    words: str
    task: Task
    delta: float
    group: int  # episodes of an item
    episodes: int = 144  # of a stage, however they are sampled


CELLS = [
    Cell("columns, 4 agents", Columns(4), DELTA, group=3),
    Cell("columns, 8 agents", Columns(8), DELTA, group=3),
    Cell("must differ, 4 agents, 4 kinds of item", Differ(4, kinds=4), 0.2, group=6),
    Cell("must differ, 4 agents, 1 kind of item", Differ(4, kinds=1), 0.2, group=6),
    Cell("must differ, 4 agents, 1 kind of item", Differ(4, kinds=1), 0.2, group=6, episodes=576),
    Cell("must differ, 4 agents, 1 kind of item", Differ(4, kinds=1), 0.4, group=6, episodes=576),
]


def learning(cell: Cell, seeds: int) -> Rows:
    """Success after the last stage and its mean over all of them, with standard errors over seeds."""
    rows: Rows = {}

    def add(name: str, rule: Variant, episodes: float) -> float:
        course = Learner(cell.task, rule, seeds, episodes, cell.group, cell.delta).run(STAGES)
        final_S, area_S = course.success_KS[-1], course.success_KS.mean(0)
        share = course.messages / (STAGES * cell.episodes * cell.task.agents)
        rows[name] = {"final": final_S.mean(), "error": final_S.std(ddof=1) / np.sqrt(seeds)}
        rows[name] |= {"area": area_S.mean(), "its error": area_S.std(ddof=1) / np.sqrt(seeds), "messages": share}
        return share

    for name, rule in VARIANTS.items():
        share = add(name, rule, cell.episodes)
        if rule.by_ess:
            for other in ("naive", "window"):
                add(f"{other}, as few messages", VARIANTS[other], share * cell.episodes)
    return rows


def messages_of_a_stage(agents: int, router: str, order: str) -> tuple[int, float]:
    """Of a stage's n rollouts, one episode each: all said anew, and without those that the last update left as they were. The
    first rollout has new items, so it is all new."""
    total = agents * (2 if router.endswith("2 rounds") else 1)
    # in the one blind round nobody hears the updated agent, so that only its own message changes
    anew_N = np.ones(agents) if router == "blind" else total - np.arange(agents)
    later = {"fixed": anew_N[:-1].sum(), "reverse": anew_N[1:].sum(), "random": anew_N.mean() * (agents - 1)}
    return agents * total, total + float(later[order])


def saved_messages() -> Rows:
    return {
        f"{router}, {order} order": {
            f"n = {n}, {what}": value
            for n in (3, 4, 8)
            for what, value in zip(("all", "new"), messages_of_a_stage(n, router, order), strict=True)
        }
        for router in ("round_robin", "round_robin, 2 rounds", "blind")
        for order in ("fixed", "random", "reverse")
    }


def fitted(task: Task, team_SNCA: Array, agent: int, rollout: Rollout, chosen_SG: Bools | None = None) -> Array:
    """A candidate from the rollout, which another team may have played, or from the chosen groups of it."""
    signal_SGE = signals(rollout, rollout.weights(team_SNCA))
    if chosen_SG is not None:
        signal_SGE = signal_SGE * chosen_SG[..., None]
    visits_SC = task.solve(team_SNCA)[1][:, agent]
    return step(team_SNCA, agent, gradient(team_SNCA, agent, rollout, signal_SGE), DELTA, visits_SC)


def context_kl(team_SNCA: Array, new_SNCA: Array, agent: int) -> Array:
    return (np.exp(team_SNCA[:, agent]) * (team_SNCA[:, agent] - new_SNCA[:, agent])).sum(-1)


@cache
def halfway() -> Array:
    learner = Learner(Columns(4), VARIANTS["naive"], 1, 2000, GROUP, DELTA)
    learner.run(2)
    return learner.team_SNCA


class Bench:
    """Teams of four as consecutive updates left them, halfway through the columns: the same for every replicate, so that only
    what is sampled varies."""

    def __init__(self, updates: int, replicates: int, order: tuple[int, ...] = (1, 3, 0, 2)) -> None:
        self.task = Columns(4)
        self.draws, self.teams = [np.random.default_rng(order)], [halfway()]
        self.updated = np.resize(order, updates).tolist()
        for agent in self.updated:
            self.teams.append(fitted(self.task, self.teams[-1], agent, self.play(self.teams[-1], groups=400)))
        self.agent = int(np.resize(order, updates + 1)[-1])  # the next one
        self.draws = [np.random.default_rng([*order, replicate]) for replicate in range(replicates)]
        self.today_SNCA = self.everywhere(self.teams[-1])

    def everywhere(self, team_1NCA: Array) -> Array:
        return np.repeat(team_1NCA, len(self.draws), axis=0)

    def play(self, team_1NCA: Array, groups: int = GROUPS) -> Rollout:
        return play(self.task, self.everywhere(team_1NCA), self.draws, new_items(self.task, self.draws, groups), GROUP)

    def carry_on(self, team_1NCA: Array, last: Rollout, updated: int) -> Rollout:
        kept = (self.task.unchanged(updated), last.action_SGEN)
        return play(self.task, self.everywhere(team_1NCA), self.draws, last.items_SGN, GROUP, kept)

    def gradients(self, rollouts: list[Rollout], weighted: bool = True, kind: str = "no_norm") -> Array:
        """One of each replicate, per episode."""
        total_SCA = np.zeros((len(self.draws), *self.today_SNCA.shape[2:]))
        for rollout in rollouts:
            signal_SGE = signals(rollout, rollout.weights(self.today_SNCA) if weighted else None, kind)
            total_SCA += gradient(self.today_SNCA, self.agent, rollout, signal_SGE)
        return total_SCA / (len(rollouts) * GROUPS * GROUP)

    def exact_gradient(self) -> Array:
        """Of today's success by the agent's logits, by differences."""
        logits_NCA, width = self.teams[-1][0], 1e-5
        found_CA = np.zeros(logits_NCA.shape[1:])
        for cell in np.ndindex(*found_CA.shape):
            for sign in (1, -1):
                moved_NCA = logits_NCA.copy()
                moved_NCA[(self.agent, *cell)] += sign * width
                found_CA[cell] += sign * self.task.solve(log_softmax(moved_NCA)[None])[0][0] / (2 * width)
        return found_CA


def window_gradients(replicates: int, windows: tuple[int, ...] = (1, 2, 3, 5, 7)) -> Rows:
    """How far the mean estimate lies from the expectation over today's team, as a share of its length, with the distance that
    chance alone gives; and the variance, as a share of one fresh rollout's. Advantages that are not normalised have a known
    expectation, (1 - 1/G) times the gradient of the success; for normalised ones it is the mean of fresh estimates."""
    bench = Bench(max(windows), replicates)
    rows: Rows = {}

    def add(name: str, found_SCA: Array, expected_CA: Array, one: float, noise: float = 0) -> None:
        """`noise`: the variance of one of those that the expectation is a mean of."""
        length, spread = np.linalg.norm(expected_CA), found_SCA.var(0, ddof=1).sum()
        off, chance = np.linalg.norm(found_SCA.mean(0) - expected_CA) / length, np.sqrt((spread + noise) / replicates) / length
        rows[name] = {"off": float(off), "by chance": float(chance), "variance": float(spread / one)}

    exact_CA = (1 - 1 / GROUP) * bench.exact_gradient()
    played = [bench.play(team) for team in bench.teams]
    fresh_SCA, normal_SCA = bench.gradients(played[-1:]), bench.gradients(played[-1:], kind="group")
    one, normal_one = fresh_SCA.var(0, ddof=1).sum(), normal_SCA.var(0, ddof=1).sum()
    add("fresh rollout", fresh_SCA, exact_CA, one)
    for length in windows:
        add(f"window of {length}", bench.gradients(played[-1 - length : -1]), exact_CA, one)
    add(f"window of {windows[-1]}, no weights", bench.gradients(played[-1 - windows[-1] : -1], weighted=False), exact_CA, one)
    add("window of 3, normalised", bench.gradients(played[-4:-1], kind="group"), normal_SCA.mean(0), normal_one, normal_one)
    return rows


def held_out_kl(replicates: int) -> Rows:
    """Estimates of a step's KL as shares of the exact one, by the groups they are read on. Four agents must differ, and do so on
    half of the kinds of item: there groups do not vary in return, and the step hardly moves the agent."""
    task, agent, groups, group = Differ(4, kinds=4), 0, 24, 6
    draws = [np.random.default_rng([5, replicate]) for replicate in range(replicates)]
    sharpness_C11 = np.array([8, 8, 2, 2]).reshape(-1, 1, 1)
    team_SNCA = np.repeat(log_softmax(sharpness_C11 * np.eye(4)).transpose(1, 0, 2)[None], replicates, axis=0)
    rollout, other = (play(task, team_SNCA, draws, new_items(task, draws, groups), group) for _ in range(2))
    held_SG, random_SG = ~rollout.fit_SG, np.tile(np.arange(groups) < groups * HOLDOUT, (replicates, 1))
    weight_SG = np.stack([weights_of(held_G, mixed_G) for held_G, mixed_G in zip(held_SG, rollout.mixed_SG, strict=True)])
    reads = {
        "all groups": (np.ones_like(held_SG), ~np.zeros_like(held_SG)),
        "held out at random": (random_SG, ~random_SG),
        "held out, even ones first": (weight_SG * held_SG, ~held_SG),
        "the same, no weights": (held_SG, ~held_SG),
    }
    rows: Rows = {}
    for name, (by_SG, fit_SG) in reads.items():
        rows[name] = {"left to fit": (rollout.mixed_SG & fit_SG).sum() / rollout.mixed_SG.sum()}
        for step_of, new_SNCA in (
            ("another rollout", fitted(task, team_SNCA, agent, other)),
            ("the rest", fitted(task, team_SNCA, agent, rollout, fit_SG)),
        ):
            kl_SC = context_kl(team_SNCA, new_SNCA, agent)
            kl_SG = kl_SC[np.arange(replicates)[:, None], rollout.context_SGEN[:, :, 0, agent]]
            moved_S = kl_SC.any(1)  # a rollout may have no group with a gradient
            share_S = (by_SG * kl_SG).sum(1)[moved_S] / by_SG.sum(1)[moved_S] / kl_SC.mean(1)[moved_S]
            rows[name] |= {f"step of {step_of}": share_S.mean(), f"error, {step_of}": share_S.std(ddof=1) / len(share_S) ** 0.5}
    return rows


def weights_of(held_G: Bools, mixed_G: Bools) -> Array:
    """The trainer's own, of groups of equal size."""
    episodes: list[Any] = [SimpleNamespace(item_id=str(group), group=group) for group in range(len(held_G))]
    return judging_weights(episodes, episodes, set(np.flatnonzero(held_G)), set(np.flatnonzero(mixed_G)))


def dependence(replicates: int) -> Rows:
    """Over all orders of four agents. A candidate is fitted on the rollout before the newest; its gain and KL as they read on the
    newest, as shares of the exact ones. And the variance of a gradient from the three rollouts before, as a share of that of
    rollouts that do not continue each other."""
    readings: dict[str, list[tuple[float, float, float]]] = {"exact": [], "fresh": [], "continued": [], "fitted on": []}
    for order in permutations(range(4)):
        bench = Bench(3, replicates, order)
        task, agent, today_SNCA = bench.task, bench.agent, bench.today_SNCA
        alone = [bench.play(team) for team in bench.teams]
        chain = alone[:1]
        for team, updated in zip(bench.teams[1:], bench.updated, strict=True):
            chain.append(bench.carry_on(team, chain[-1], updated))
        new_SNCA = fitted(task, today_SNCA, agent, chain[-2])
        gain = float((task.solve(new_SNCA)[0] - task.solve(today_SNCA)[0]).mean())
        readings["exact"].append((gain, DELTA, 1.0))
        for name, newest, before in (("fresh", alone[-1], alone[:-1]), ("continued", chain[-1], chain[:-1])):
            readings[name].append((*judged(newest, today_SNCA, new_SNCA, agent), bench.gradients(before).var(0, ddof=1).sum()))
        readings["fitted on"].append((*judged(chain[-2], today_SNCA, new_SNCA, agent), np.nan))
    mean = {name: np.mean(found, axis=0) for name, found in readings.items()}
    names = {"fresh": "fresh", "continued": "continued", "fitted on": "what it was fitted on"}
    return {
        words: {
            "gain": float(mean[name][0] / mean["exact"][0]),
            "KL": float(mean[name][1] / DELTA),
            "variance": None if name == "fitted on" else float(mean[name][2] / mean["fresh"][2]),
        }
        for name, words in names.items()
    }


def judged(rollout: Rollout, today_SNCA: Array, new_SNCA: Array, agent: int) -> tuple[float, float]:
    """Gain and KL as a judge reads them. Every agent speaks once, so that the ratio at that message makes the gain exact in
    expectation."""
    weight_SGE, played = rollout.weights(today_SNCA), (rollout.context_SGEN, rollout.action_SGEN)
    ratio_SGE = np.exp(log_played(new_SNCA, *played) - log_played(today_SNCA, *played))
    gain = ((ratio_SGE - 1) * signals(rollout, weight_SGE, "leave_one_out")).mean()
    kl_SGE = context_kl(today_SNCA, new_SNCA, agent)[np.arange(len(ratio_SGE))[:, None, None], rollout.context_SGEN[..., agent]]
    return float(gain), float((weight_SGE * kl_SGE).mean() / weight_SGE.mean())


def run_studies(seeds: int) -> dict[str, Rows]:
    studies = {
        f"{cell.words}, delta {cell.delta}, {STAGES} stages of {cell.episodes} episodes, {seeds} seeds": learning(cell, seeds)
        for cell in CELLS
    }
    return studies | {
        "Messages of a stage, one episode a rollout: all, and those that are new where old beginnings go on": saved_messages(),
        f"Gradient of one of 4 agents from rollouts of {GROUPS * GROUP} episodes": window_gradients(REPLICATES),
        "KL of a step, by what it is read on, as a share of the exact one": held_out_kl(REPLICATES),
        "Old beginnings go on: gain and KL as they read, by the episodes that judge": dependence(max(2, REPLICATES // 10)),
    }


def written(studies: dict[str, Rows]) -> str:
    lines = []
    for heading, rows in studies.items():
        width, columns = max(map(len, rows)), list(next(iter(rows.values())))
        lines += [heading, " " * width + "".join(f"  {column:>10}" for column in columns)]
        for name, row in rows.items():
            values = ["" if (value := row.get(column)) is None else f"{value:.3f}" for column in columns]
            lines.append(f"{name:{width}}" + "".join(f"  {v:>{max(10, len(c))}}" for v, c in zip(values, columns, strict=True)))
        lines.append("")
    return "\n".join(lines + [f"{name:20}{variant.words}" for name, variant in VARIANTS.items()])
