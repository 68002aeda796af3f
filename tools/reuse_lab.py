"""What reusing episodes is worth: softmax teams learn two small tasks, and only the episodes they learn from differ.

A part of theory_lab.py (`--part reuse`). Every update steps along its estimated gradient exactly to the edge of a KL ball of
radius delta; success and occupancy are exact too. Advantages, hold-out and caps are the trainer's own.

Shape suffixes: S seed, G group, E episode of a group, N agent (who speaks once, in turn), C context, A action.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from tabular_lab import Array

from teamtr_lora.algorithm.advantage import group_advantages
from teamtr_lora.algorithm.variants.reuse import HoldOut
from teamtr_lora.training.window import LARGEST_WEIGHT

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
CLIP, EPS, HOLDOUT, LEAST_ESS = 3.0, 1e-6, 0.25, 0.8  # the recipe's defaults
QUADRUPLINGS, BISECTIONS = 40, 40


class Task(ABC):
    """Agents speak once each, in turn; a team is a table of log-probabilities [S, N, C, A]."""

    agents: int
    contexts: int
    actions: int
    blind: ClassVar[bool]  # nobody sees the others' messages

    def unchanged(self, agent: int) -> Bools:
        """Whose messages are still distributed as the new team's after an update of `agent`."""
        turn_N = np.arange(self.agents)
        return turn_N != agent if self.blind else turn_N < agent

    @abstractmethod
    def draw_items(self, rng: np.random.Generator, groups: int) -> Ints:
        """[G, N]: what each agent is given."""

    @abstractmethod
    def context(self, given: Ints, before: Ints | None) -> Ints:
        """From the agent's input and the message of the agent before it, if there is one."""

    @abstractmethod
    def reward(self, context: Ints, action: Ints) -> Array:
        """Over the last axis, the agents'."""

    @abstractmethod
    def solve(self, team_SNCA: Array) -> tuple[Array, Array]:
        """The exact success [S], and each agent's distribution over its contexts [S, N, C]."""

    @abstractmethod
    def first_team(self, rng: np.random.Generator) -> Array:
        """[N, C, A]"""


class Columns(Task):
    """Addition of two binary numbers, one column an agent: it sees its two digits' sum and the carry that the agent before it has
    announced, and says the column's total. Right if every total is."""

    contexts, actions, blind = 6, 4, False
    INPUTS = np.array([0.25, 0.5, 0.25])
    RIGHT_C = np.array([0, 1, 1, 2, 2, 3])  # of context 2 * sum + carry

    def __init__(self, agents: int, head_start: float = 1.5) -> None:
        self.agents, self.head_start = agents, head_start

    def draw_items(self, rng: np.random.Generator, groups: int) -> Ints:
        return rng.choice(len(self.INPUTS), size=(groups, self.agents), p=self.INPUTS)

    def context(self, given: Ints, before: Ints | None) -> Ints:
        return 2 * given if before is None else 2 * given + (before >= 2)

    def reward(self, context: Ints, action: Ints) -> Array:
        return (self.RIGHT_C[context] == action).all(-1).astype(float)

    def solve(self, team_SNCA: Array) -> tuple[Array, Array]:
        carry_C = np.arange(self.contexts) % 2
        odds_SNCA, announced_A = np.exp(team_SNCA), np.arange(self.actions) >= 2
        carries_S2 = np.tile([1.0, 0.0], (len(team_SNCA), 1))
        right_S2, visits = carries_S2, []
        for agent in range(self.agents):
            visits.append(carries_S2[:, carry_C] * np.repeat(self.INPUTS, 2))
            right_SC = right_S2[:, carry_C] * np.repeat(self.INPUTS, 2) * odds_SNCA[:, agent, range(self.contexts), self.RIGHT_C]
            one_S = (visits[-1] * odds_SNCA[:, agent][..., announced_A].sum(-1)).sum(-1)
            carries_S2 = np.stack([1 - one_S, one_S], -1)
            right_S2 = np.stack([right_SC[:, self.RIGHT_C < 2].sum(-1), right_SC[:, self.RIGHT_C >= 2].sum(-1)], -1)
        return right_S2.sum(-1), np.stack(visits, 1)

    def first_team(self, rng: np.random.Generator) -> Array:
        logits_NCA = rng.standard_normal((self.agents, self.contexts, self.actions)) / 2
        logits_NCA[:, range(self.contexts), self.RIGHT_C] += self.head_start
        return log_softmax(logits_NCA)


class Differ(Task):
    """Each agent picks one of as many options as there are agents, sees only the item's kind, and all must differ."""

    blind = True

    def __init__(self, agents: int, kinds: int = 4, spread: float = 0.1) -> None:
        self.agents, self.contexts, self.actions, self.spread = agents, kinds, agents, spread
        self._picks_PN = np.array(list(permutations(range(agents))))

    def draw_items(self, rng: np.random.Generator, groups: int) -> Ints:
        return np.repeat(rng.integers(self.contexts, size=(groups, 1)), self.agents, axis=1)

    def context(self, given: Ints, before: Ints | None) -> Ints:
        return given

    def reward(self, context: Ints, action: Ints) -> Array:
        return (np.diff(np.sort(action, axis=-1), axis=-1) > 0).all(-1).astype(float)

    def solve(self, team_SNCA: Array) -> tuple[Array, Array]:
        log_SCP = sum(team_SNCA[:, agent][..., self._picks_PN[:, agent]] for agent in range(self.agents))
        visits_SNC = np.full(team_SNCA.shape[:3], 1 / self.contexts)
        return np.exp(log_SCP).sum(-1).mean(-1), visits_SNC

    def first_team(self, rng: np.random.Generator) -> Array:
        return log_softmax(self.spread * rng.standard_normal((self.agents, self.contexts, self.actions)))


def log_softmax(logits: Array) -> Array:
    high = logits - logits.max(-1, keepdims=True)
    return high - np.log(np.exp(high).sum(-1, keepdims=True))


@dataclass
class Rollout:
    items_SGN: Ints
    context_SGEN: Ints
    action_SGEN: Ints
    return_SGE: Array
    log_played_SGE: Array  # by the team that played it
    used_S: Bools = field(init=False)  # seeds that have not dropped it

    def __post_init__(self) -> None:
        self.used_S = np.ones(len(self.return_SGE), dtype=bool)

    @cached_property
    def mixed_SG(self) -> Bools:  # noqa: N802
        return self.return_SGE.max(-1) > self.return_SGE.min(-1)

    @cached_property
    def fit_SG(self) -> Bools:  # noqa: N802
        """Groups for the gradient where the others judge, by the trainer's own rule."""
        rule = HoldOut(SimpleNamespace(holdout=HOLDOUT))
        newest = [SimpleNamespace(item_id=f"{g:04}", group=g) for g in range(self.mixed_SG.shape[1])]
        fit_SG = np.zeros_like(self.mixed_SG)
        for seed, mixed_G in enumerate(self.mixed_SG):
            fit_SG[seed, rule.divide(newest, np.flatnonzero(mixed_G).tolist(), False, seed=seed).fit] = True
        return fit_SG

    def log_weights(self, team_SNCA: Array) -> Array:
        """How much likelier this team is to play each episode."""
        return log_played(team_SNCA, self.context_SGEN, self.action_SGEN) - self.log_played_SGE

    def weights(self, team_SNCA: Array) -> Array:
        return np.exp(np.minimum(self.log_weights(team_SNCA), np.log(LARGEST_WEIGHT)))

    def effective_share(self, team_SNCA: Array) -> Array:
        weight_SGE = np.exp(self.log_weights(team_SNCA))
        return weight_SGE.mean((1, 2)) ** 2 / (weight_SGE**2).mean((1, 2))


def log_played(team_SNCA: Array, context_SGEN: Ints, action_SGEN: Ints) -> Array:
    seed_S111 = np.arange(len(team_SNCA)).reshape(-1, 1, 1, 1)
    return team_SNCA[seed_S111, np.arange(team_SNCA.shape[1]), context_SGEN, action_SGEN].sum(-1)


Draws = Sequence[np.random.Generator]  # one a seed, so that a seed's course does not depend on how many there are


def new_items(task: Task, draws: Draws, groups: int) -> Ints:
    return np.stack([task.draw_items(rng, groups) for rng in draws])


def play(
    task: Task, team_SNCA: Array, draws: Draws, items_SGN: Ints, episodes: int, kept: tuple[Bools, Ints] | None = None
) -> Rollout:
    """`episodes` of each item. `kept`: agents whose messages are not said anew, and all messages of the episodes to continue."""
    shape = (*items_SGN.shape[:2], episodes)
    draw_SGEN = np.stack([rng.random((*shape[1:], task.agents)) for rng in draws])
    context_SGEN, action_SGEN = np.zeros((2, *shape, task.agents), dtype=np.int64)
    seed_S11, before = np.arange(shape[0]).reshape(-1, 1, 1), None
    for agent in range(task.agents):
        context = task.context(np.broadcast_to(items_SGN[:, :, None, agent], shape), before)
        if kept is not None and kept[0][agent]:
            action = np.broadcast_to(kept[1][..., agent], shape)
        else:
            levels = np.exp(team_SNCA[:, agent]).cumsum(-1)[seed_S11, context]
            action = (draw_SGEN[..., agent, None] > levels[..., :-1]).sum(-1)
        context_SGEN[..., agent], action_SGEN[..., agent] = context, action
        before = action
    rewards = task.reward(context_SGEN, action_SGEN)
    return Rollout(items_SGN, context_SGEN, action_SGEN, rewards, log_played(team_SNCA, context_SGEN, action_SGEN))


def signals(rollout: Rollout, weight_SGE: Array | None, kind: str = "group") -> Array:
    """What multiplies each message's score: the trainer's advantage, times the weight where there is one."""
    seeds, groups, episodes = rollout.return_SGE.shape
    found = group_advantages(
        torch.from_numpy(rollout.return_SGE.ravel()),
        torch.arange(seeds * groups).repeat_interleave(episodes),
        clip=CLIP,
        eps=EPS,
        kind=kind,
        weight_E=None if weight_SGE is None else torch.from_numpy(weight_SGE.ravel()),
    )
    signal_SGE = found.clipped_E.double().numpy().reshape(rollout.return_SGE.shape)
    return signal_SGE if weight_SGE is None else signal_SGE * weight_SGE


def gradient(team_SNCA: Array, agent: int, rollout: Rollout, signal_SGE: Array) -> Array:
    """By the agent's logits [S, C, A], summed over episodes."""
    seeds, _, contexts, actions = team_SNCA.shape
    row = np.arange(seeds).reshape(-1, 1, 1) * contexts + rollout.context_SGEN[..., agent]
    cell = (row * actions + rollout.action_SGEN[..., agent]).ravel()
    said_SCA = np.bincount(cell, signal_SGE.ravel(), seeds * contexts * actions).reshape(seeds, contexts, actions)
    return said_SCA - np.exp(team_SNCA[:, agent]) * said_SCA.sum(-1, keepdims=True)


def step(team_SNCA: Array, agent: int, direction_SCA: Array, delta: float, visits_SC: Array) -> Array:
    """The team after moving the agent's logits along the direction until its mean KL, contexts as visited, is `delta`. Where the
    direction is zero nothing moves."""
    current_SCA = team_SNCA[:, agent]
    largest_S = np.abs(direction_SCA).max((1, 2))
    unit_SCA = direction_SCA / np.where(largest_S > 0, largest_S, 1)[:, None, None]

    def moved(length_S: Array) -> Array:
        return log_softmax(current_SCA + length_S[:, None, None] * unit_SCA)

    def inside(length_S: Array) -> Bools:
        kl_SC = (np.exp(current_SCA) * (current_SCA - moved(length_S))).sum(-1)
        return (visits_SC * kl_SC).sum(-1) <= delta

    low_S, high_S = np.zeros(len(team_SNCA)), np.full(len(team_SNCA), 1e-3)
    for _ in range(QUADRUPLINGS):
        within_S = inside(high_S) & (largest_S > 0)
        if not within_S.any():
            break
        low_S, high_S = np.where(within_S, high_S, low_S), np.where(within_S, 4 * high_S, high_S)
    for _ in range(BISECTIONS):
        middle_S = (low_S + high_S) / 2
        within_S = inside(middle_S)
        low_S, high_S = np.where(within_S, middle_S, low_S), np.where(within_S, high_S, middle_S)
    new_SNCA = team_SNCA.copy()
    new_SNCA[:, agent] = np.where((largest_S > 0)[:, None, None], moved(low_S), current_SCA)
    return new_SNCA


@dataclass(frozen=True)
class Variant:
    """Which episodes an update learns from. What is fresh is also divided, so that a part of it can judge the candidate."""

    words: str
    fresh: bool = True  # the team is sampled before every update; else once a stage
    joint: bool = False  # all updates of a stage start from its first team
    weighted: bool = False
    window: bool = False  # the last n - 1 rollouts, and the newest one judges
    newest: bool = False  # the window, and the newest rollout's fitting part
    least_ess: float = LEAST_ESS  # rollouts below it drop out of the window
    continued: bool = False  # within a stage, messages that an update left as they were are not said again
    branched: bool = False  # one beginning a group, up to the updated agent's turn
    by_ess: bool = False  # sampled only when the rollouts kept are worth less than least_ess of n fresh ones


VARIANTS = {
    "naive": Variant("stage-start episodes for all updates", fresh=False),
    "joint": Variant("the same, and all updates at once", fresh=False, joint=True),
    "importance": Variant("stage-start episodes, weighted", fresh=False, weighted=True),
    "TeamTR": Variant("fresh episodes for every update"),
    "window": Variant("the last n - 1 rollouts, weighted; the fresh one judges", window=True),
    "window, 0.5": Variant("the same, kept down to an effective size of 0.5", window=True, least_ess=0.5),
    "window, all kept": Variant("the same, whatever their effective size", window=True, least_ess=0.0),
    "window + newest": Variant("and three quarters of the fresh one", window=True, newest=True),
    "by effective size": Variant("window, sampled again only below 0.8 of n rollouts", window=True, newest=True, by_ess=True),
    "continued": Variant("TeamTR, old beginnings go on", continued=True),
    "window, continued": Variant("window, old beginnings go on", window=True, continued=True),
    "branched": Variant("TeamTR, one beginning a group", branched=True),
}


@dataclass
class Course:
    success_KS: Array  # of the first team, then after every stage
    messages: float  # per seed, all stages


class Learner:
    """All seeds of one variant."""

    def __init__(self, task: Task, variant: Variant, seeds: int, episodes: float, group: int, delta: float) -> None:
        self.task, self.variant, self.delta, self.group = task, variant, delta, group
        self.draws = [np.random.default_rng([seed, task.agents]) for seed in range(seeds)]
        self.team_SNCA = np.stack([task.first_team(rng) for rng in self.draws])
        self.orders = np.random.default_rng(task.agents)  # of updates: the same for all seeds and variants
        self.per_stage = episodes * task.agents  # messages
        self.purse = 0.0  # messages not yet spent: a stage has whole groups only, and the rest is for the next
        self.spent = 0.0
        self.kept: list[Rollout] = []

    def run(self, stages: int) -> Course:
        success = [self.task.solve(self.team_SNCA)[0]]
        for _ in range(stages):
            self.stage(self.orders.permutation(self.task.agents).tolist())
            success.append(self.task.solve(self.team_SNCA)[0])
        return Course(np.stack(success), self.spent)

    def stage(self, order: list[int]) -> None:
        first_SNCA, rollout = self.team_SNCA, None
        for place, agent in enumerate(order):
            if self.variant.by_ess:
                self.sample_where_needed(order, place)
            elif self.variant.fresh or rollout is None:
                rollout = self.sample(order, place, rollout)
            at_SNCA = first_SNCA if self.variant.joint else self.team_SNCA
            direction_SCA = self.direction(at_SNCA, agent, rollout)
            moved_SNCA = step(at_SNCA, agent, direction_SCA, self.delta, self.task.solve(at_SNCA)[1][:, agent])
            self.team_SNCA = self.team_SNCA.copy()
            self.team_SNCA[:, agent] = moved_SNCA[:, agent]

    def sample(self, order: list[int], place: int, last: Rollout | None) -> Rollout:
        """The team as it is now; what it costs leaves the purse."""
        task, variant, group = self.task, self.variant, self.group
        kept = task.unchanged(order[place - 1]) if place else np.zeros(task.agents, dtype=bool)
        if variant.continued and last is not None:
            self.spend(last.return_SGE[0].size * (~kept).sum())
            return play(task, self.team_SNCA, self.draws, last.items_SGN, group, (kept, last.action_SGEN))
        self.purse += self.per_stage / (task.agents if variant.fresh and not variant.continued else 1)
        beginning_N = task.unchanged(order[place]) if variant.branched else np.zeros(task.agents, dtype=bool)
        price = beginning_N.sum() + group * (~beginning_N).sum()
        stage_price = price
        if variant.continued:
            stage_price = price + group * sum((~task.unchanged(agent)).sum() for agent in order[:-1])
        items_SGN = new_items(task, self.draws, max(1, int(self.purse / stage_price)))
        self.spend(items_SGN.shape[1] * price)
        if not variant.branched:
            return play(task, self.team_SNCA, self.draws, items_SGN, group)
        beginning = play(task, self.team_SNCA, self.draws, items_SGN, 1)
        return play(task, self.team_SNCA, self.draws, items_SGN, group, (beginning_N, beginning.action_SGEN))

    def sample_where_needed(self, order: list[int], place: int) -> None:
        """Of a rollout that is kept, the groups that judge stay out of the gradient: there may be nothing newer to judge by."""
        self.drop_stale()
        worth_S, taught_S = np.zeros(len(self.draws)), np.zeros(len(self.draws), dtype=bool)
        for part in self.kept:
            worth_S += part.used_S * part.effective_share(self.team_SNCA)
            taught_S |= part.used_S & (part.fit_SG & part.mixed_SG).any(1)
        # a team that has nothing to learn from does not move, so that its episodes would stay good for ever
        needed_S = (worth_S < self.variant.least_ess * self.task.agents) | ~taught_S
        rollout = self.sample(order, place, None)  # for all, so that no seed's draws depend on another's needs
        self.spent -= (1 - needed_S.mean()) * rollout.action_SGEN[0].size
        rollout.used_S = needed_S
        self.kept = [part for part in [*self.kept, rollout] if part.used_S.any()]

    def drop_stale(self) -> None:
        for part in self.kept:
            part.used_S = part.used_S & (part.effective_share(self.team_SNCA) >= self.variant.least_ess)

    def spend(self, messages: float) -> None:
        self.purse -= messages
        self.spent += messages

    def direction(self, team_SNCA: Array, agent: int, newest: Rollout | None) -> Array:
        variant = self.variant
        total_SCA = np.zeros((len(team_SNCA), *team_SNCA.shape[2:]))
        learned_S = np.zeros(len(team_SNCA), dtype=bool)
        if variant.window:
            self.drop_stale()
            for part in self.kept:
                signal_SGE = signals(part, part.weights(team_SNCA)) * part.used_S[:, None, None]
                if newest is None:
                    signal_SGE = signal_SGE * part.fit_SG[..., None]
                learned_S |= (signal_SGE != 0).any((1, 2))
                total_SCA += gradient(team_SNCA, agent, part, signal_SGE)
        if newest is None:
            return total_SCA
        # with nothing earlier to learn from, as in the first update, the fresh rollout is divided
        fit_SG = newest.fit_SG if variant.newest else newest.fit_SG & ~learned_S[:, None]
        signal_SGE = signals(newest, newest.weights(team_SNCA) if variant.weighted else None) * fit_SG[..., None]
        if variant.window:
            self.kept = [*self.kept, newest][-(self.task.agents - 1) :]
        return total_SCA + gradient(team_SNCA, agent, newest, signal_SGE)
