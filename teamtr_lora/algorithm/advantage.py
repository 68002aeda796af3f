"""Group-normalised advantages (eq:group_adv)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from teamtr_lora.algorithm.variants.advantage_kinds import ADVANTAGES

ROUNDING = 1e-9  # returns this close, as a share of the larger or of 1, are equal


def message_discount(setting: str | float, messages: int) -> float:
    """gamma per message in episodes of at most `messages`: the recipe's `training.discount`, where auto is 1 - 1 / messages."""
    return 1 - 1 / messages if setting == "auto" else float(setting)


@dataclass(frozen=True)
class GroupAdvantages:
    clipped_E: Tensor  # what the surrogate uses
    unclipped_E: Tensor  # kept for the zeta proxies
    clip_rate: float
    groups: int
    zero_variance_groups: int


def group_advantages(
    returns_E: Tensor, group_E: Tensor, *, clip: float, eps: float, kind: str = "group", weight_E: Tensor | None = None
) -> GroupAdvantages:
    """`clip((R - mean) / sqrt(var + eps))` with the population variance of each group, eps inside the root.

    That is the kind `group`; the table ADVANTAGES has the others. In float64: rewards are few, and a group of equal returns must
    give exactly zero, also where they are sums of the same rewards in another order.

    `weight_E` is for episodes that another team played: how much likelier today's is to play each. They enter the group's mean
    and variance; whoever uses the advantages multiplies them by the weights once more.
    """
    returns_E = returns_E.double()
    _, index_E = torch.unique(group_E, return_inverse=True)
    groups = int(index_E.max()) + 1

    def total(values_E: Tensor) -> Tensor:
        return torch.zeros(groups, dtype=torch.float64).index_add_(0, index_E, values_E)

    size_G = total(torch.ones_like(returns_E))
    low_G = torch.full((groups,), torch.inf, dtype=torch.float64).scatter_reduce_(0, index_E, returns_E, "amin")
    high_G = torch.full((groups,), -torch.inf, dtype=torch.float64).scatter_reduce_(0, index_E, returns_E, "amax")
    equal_G = high_G - low_G <= ROUNDING * torch.maximum(low_G.abs(), high_G.abs()).clamp(min=1)
    if weight_E is None:
        off_E = returns_E - (total(returns_E) / size_G)[index_E]
        variance_G = total(torch.where(equal_G[index_E], 0.0, off_E) ** 2) / size_G
    else:
        # R - mean is (1 - 1/G) times R minus the mean of the others. With the weighted mean of the others, which does not depend
        # on the episode itself, the weighted gradient has exactly the expectation that it has over today's own episodes. Beside
        # an episode that has all of its group's weight there are no others to compare it with.
        weight_E = weight_E.double()
        whole_E = total(weight_E)[index_E]
        alone_E = whole_E - weight_E <= ROUNDING * whole_E
        others_E = (total(weight_E * returns_E)[index_E] - weight_E * returns_E) / (whole_E - weight_E)
        off_E = torch.where(alone_E, 0.0, (1 - 1 / size_G)[index_E] * (returns_E - others_E))
        variance_G = total(weight_E * torch.where(equal_G[index_E], 0.0, off_E) ** 2) / total(weight_E)
    centred_E = torch.where(equal_G[index_E], 0.0, off_E)
    made = ADVANTAGES[kind]()
    unclipped_E = made.scaled(centred_E, torch.sqrt(variance_G[index_E] + eps), size_G[index_E])
    clipped_E = unclipped_E.clamp(-clip, clip) if made.clipped else unclipped_E
    return GroupAdvantages(
        clipped_E=clipped_E.float(),
        unclipped_E=unclipped_E.float(),
        clip_rate=float((unclipped_E.abs() > clip).double().mean()) if made.clipped else 0.0,
        groups=groups,
        zero_variance_groups=int(equal_G.sum()),
    )
