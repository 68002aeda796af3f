"""Small exact teams: random turn-taking decision processes in which everything the theory speaks of is a linear solve.

At every state one agent is active (lem:activefactor), so a team is one table of probabilities [S, A] whose rows belong to the
agents, and replacing an agent replaces its rows. Used by the property tests of algorithm/ and by theory_lab.py.

Shape suffixes: S state, A action, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# KL grows with the square of the length: doubling this often overshoots any radius that can be reached at all.
DOUBLINGS, BISECTIONS = 60, 80


@dataclass(frozen=True)
class Lab:
    agent_S: NDArray[np.int64]  # who is active
    transition_SAS: Array  # rows sum to at most 1; what is missing ends the episode
    reward_SA: Array
    start_S: Array
    gamma: float  # 1 is allowed where every episode ends

    @property
    def agents(self) -> int:
        return int(self.agent_S.max()) + 1


def random_lab(
    rng: np.random.Generator,
    *,
    agents: int,
    contexts: int,
    actions: int,
    gamma: float,
    spread: float = 1.0,
    round_robin: bool = True,
) -> Lab:
    """A continuing process with `contexts` states an agent. A small `spread` makes transitions nearly deterministic, where the
    occupancy bounds come closest to equality; without `round_robin` the router is random."""
    states = agents * contexts
    agent_S = np.arange(states) % agents
    follows_SS = (agent_S[None, :] == (agent_S[:, None] + 1) % agents) if round_robin else np.ones((states, states), dtype=bool)
    transition_SAS = np.zeros((states, actions, states))
    for s in range(states):
        (after,) = np.nonzero(follows_SS[s])
        transition_SAS[s][:, after] = rng.dirichlet(np.full(len(after), spread), size=actions)
    reward_SA = rng.uniform(-1, 1, (states, actions))
    start_S = rng.dirichlet(np.full(states, spread))
    return Lab(agent_S=agent_S, transition_SAS=transition_SAS, reward_SA=reward_SA, start_S=start_S, gamma=gamma)


def episode_lab(
    rng: np.random.Generator, *, agents: int, turns: int, contexts: int, actions: int, gamma: float = 1.0, spread: float = 1.0
) -> Lab:
    """Episodes as a text team plays them: `turns` messages in round robin, then the end, with a reward in [0, 1] for the last."""
    states = turns * contexts
    agent_S = (np.arange(states) // contexts) % agents
    transition_SAS = np.zeros((states, actions, states))
    for s in range(states - contexts):
        after = (s // contexts + 1) * contexts
        transition_SAS[s, :, after : after + contexts] = rng.dirichlet(np.full(contexts, spread), size=actions)
    reward_SA = np.zeros((states, actions))
    reward_SA[-contexts:] = rng.uniform(0, 1, (contexts, actions))
    start_S = np.zeros(states)
    start_S[:contexts] = rng.dirichlet(np.full(contexts, spread))
    return Lab(agent_S=agent_S, transition_SAS=transition_SAS, reward_SA=reward_SA, start_S=start_S, gamma=gamma)


def softmax(logits_SA: Array) -> Array:
    odds_SA = np.exp(logits_SA - logits_SA.max(-1, keepdims=True))
    return odds_SA / odds_SA.sum(-1, keepdims=True)


def random_team(rng: np.random.Generator, lab: Lab, scale: float = 1.0) -> Array:
    return softmax(scale * rng.standard_normal(lab.reward_SA.shape))


@dataclass(frozen=True)
class Exact:
    visits_S: Array  # expected discounted visits: d / (1 - gamma) of the paper
    value_S: Array
    advantage_SA: Array
    expected_return: float  # J


def solve(lab: Lab, policy_SA: Array) -> Exact:
    """Occupancy, value, advantage and return of a team, by two linear solves."""
    flow_SS = np.eye(len(lab.start_S)) - lab.gamma * np.einsum("sa,sat->st", policy_SA, lab.transition_SAS)
    visits_S = np.linalg.solve(flow_SS.T, lab.start_S)
    value_S = np.linalg.solve(flow_SS, (policy_SA * lab.reward_SA).sum(-1))
    action_value_SA = lab.reward_SA + lab.gamma * lab.transition_SAS @ value_S
    return Exact(visits_S, value_S, action_value_SA - value_S[:, None], float(lab.start_S @ value_S))


def state_kl(current_SA: Array, new_SA: Array) -> Array:
    """KL(current || new) at every state; infinite where the new policy has lost an action altogether."""
    with np.errstate(divide="ignore"):
        return (current_SA * (np.log(current_SA) - np.log(new_SA))).sum(-1)


def kl_functional(lab: Lab, visits_S: Array, current_SA: Array, new_SA: Array) -> float:
    """def:kltok by lem:kltokequals: the state KL averaged over the discounted occupancy of the team that `visits_S` is from."""
    return float((1 - lab.gamma) * visits_S @ state_kl(current_SA, new_SA))


def message_kl(lab: Lab, current_SA: Array, new_SA: Array, agent: int, turns: int) -> tuple[float, ...]:
    """The KL of the agent's 1st, 2nd, ... message in episodes of at most `turns`, 0 where an episode ends before it."""
    flow_SS = np.einsum("sa,sat->st", current_SA, lab.transition_SAS)
    mine_S, kl_S = lab.agent_S == agent, state_kl(current_SA, new_SA)
    here_MS = np.zeros((turns + 1, len(lab.start_S)))  # M: how often the agent has spoken before
    here_MS[0] = lab.start_S
    kl_M = np.zeros(turns + 1)
    for _ in range(turns):
        kl_M += here_MS[:, mine_S] @ kl_S[mine_S]
        spoken_MS, silent_MS = here_MS * mine_S, here_MS * ~mine_S
        here_MS = (np.roll(spoken_MS, 1, axis=0) + silent_MS) @ flow_SS  # the row that rolls over is still empty
    return tuple(kl_M[:turns])


def surrogate(visits_S: Array, policy_SA: Array, advantage_SA: Array) -> float:
    """eq:surrogate and eq:surrogate_stale with exact advantages; the visits decide which."""
    return float(visits_S @ (policy_SA * advantage_SA).sum(-1))


def replace_agent(lab: Lab, team_SA: Array, agent: int, new_SA: Array) -> Array:
    return np.where((lab.agent_S == agent)[:, None], new_SA, team_SA)


def step_to(lab: Lab, team_SA: Array, agent: int, direction_SA: Array, delta: float, weight_S: Array) -> Array:
    """The team after tilting the agent's logits along a direction until its KL, states counted by weight, is `delta`.

    With the team's discounted occupancy as weight that is def:kltok. A radius that floats cannot reach is approached.
    """

    def tilted(length: float) -> Array:
        return replace_agent(lab, team_SA, agent, softmax(np.log(team_SA) + length * direction_SA))

    def outside(length: float) -> bool:
        return bool(weight_S @ state_kl(team_SA, tilted(length)) > delta)

    low, high = 0.0, 1e-6
    for _ in range(DOUBLINGS):
        if outside(high):
            break
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if outside(middle) else (middle, high)
    return tilted(low)


@dataclass(frozen=True)
class Step:
    """One update of a stage, in exact numbers."""

    agent: int
    kl: float  # def:kltok on the team's own occupancy before the update: what the trust region bounds
    kl_start: float  # the same agents' KL on the stage-start occupancy: all that cached episodes can measure
    fresh: float  # L^seq
    stale: float  # L^stale of eq:surrogate_stale: stage-start occupancy, advantages of the intermediate team
    cached: float  # what cached episodes give: stage-start occupancy and advantages, this agent's ratio only
    gain: float  # J after - J before
    advantage_max: float  # largest |advantage| of the team before the update


Proposal = Callable[[Array, int], Array]


def run_stage(lab: Lab, start_SA: Array, order: Sequence[int], propose: Proposal) -> tuple[list[Step], Array]:
    """Updates the agents in order; `propose(team, agent)` gives the team after that agent's update."""
    start, team_SA, steps = solve(lab, start_SA), start_SA, []
    for agent in order:
        before, new_SA = solve(lab, team_SA), propose(team_SA, agent)
        after = solve(lab, new_SA)
        alone_SA = replace_agent(lab, start_SA, agent, new_SA)
        steps.append(
            Step(
                agent,
                kl=kl_functional(lab, before.visits_S, team_SA, new_SA),
                kl_start=kl_functional(lab, start.visits_S, team_SA, new_SA),
                fresh=surrogate(before.visits_S, new_SA, before.advantage_SA),
                stale=surrogate(start.visits_S, new_SA, before.advantage_SA),
                cached=surrogate(start.visits_S, alone_SA, start.advantage_SA),
                gain=after.expected_return - before.expected_return,
                advantage_max=float(np.abs(before.advantage_SA).max()),
            )
        )
        team_SA = new_SA
    return steps, team_SA
