"""`plan --gpus`: what each of several processes does, and what it sends to the others."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from teamtr_lora.base.frozen_base import BaseFacts
from teamtr_lora.recipe import Recipe
from teamtr_lora.recipe.engine_facts import ENGINES

SUM_BYTES = 8  # of a number in a sum of gradients, which are added as 64-bit integers
TOKEN_BYTES = 14  # of a sampled token with its log-probability, pickled
ID_BYTES = 5  # of a token that was read
SCORES = 3  # float32 numbers of a token that a pass tells the others: its log-probabilities, and the KL there


@dataclass(frozen=True, kw_only=True)
class Share:
    """Of one process, in one update, at most. The first ones have the most to do."""

    processes: int
    nodes: int
    gpus: int  # of one process
    items: int  # of a rollout
    episodes: int
    microbatches: int  # of a pass over what the update learns from
    all_microbatches: int
    rollout_work: float  # the share of the whole work that the busiest process does
    update_work: float
    split_base: bool
    sent_bytes: dict[str, int]  # by what; each process sends so much

    @property
    def idle(self) -> dict[str, float]:
        """The share of the time that processes wait for the busiest one, were all items and micro-batches equally dear."""
        work = {"rollouts": self.rollout_work, "updates": self.update_work}
        return {phase: 1 - 1 / (self.processes * share) for phase, share in work.items()}


def make_share(
    recipe: Recipe,
    facts: BaseFacts,
    *,
    processes: int,
    nodes: int,
    items: int,
    learned_items: int,
    messages: int,
    transcript: int,
    tokens: int,
    value: int,
    split_base: bool,
    adapter_parameters: int,
) -> Share:
    """`items` of a rollout, `learned_items` of an update; `transcript`: tokens of the longest; `tokens`: of a micro-batch;
    `value`: bytes of a weight of the base; `adapter_parameters` of the largest adapter."""
    rollout, training = recipe.rollout, recipe.training
    dealt = 1 if ENGINES[rollout.engine].by_url else processes  # the first process asks servers for all episodes
    mine, each = ceil(items / dealt), rollout.episodes_per_item
    all_microbatches = max(1, ceil(learned_items * each * transcript / tokens))
    microbatches = ceil(all_microbatches / processes)
    steps = training.inner_epochs * training.minibatches_per_epoch
    around = (processes - 1) / processes  # what a ring sends of a sum, twice, and of what is gathered, once
    sampled = mine * each * messages * rollout.max_message_tokens
    learned = learned_items * each * ceil(messages / len(recipe.team.agents)) * rollout.max_message_tokens
    read = mine * each * messages * transcript
    sent = {
        "gradients": 2 * around * steps * SUM_BYTES * adapter_parameters,
        "scores of tokens": 2 * around * training.inner_epochs * SCORES * 4 * learned,
        "episodes": (processes - 1) * (TOKEN_BYTES * sampled + ID_BYTES * read),
    }
    if split_base:  # layers are gathered for the forward and for the backward pass of every micro-batch
        layers = sum(linear.in_features * linear.out_features for linear in facts.linears)
        sent["layers of the base"] = 2 * around * training.inner_epochs * microbatches * value * layers
    return Share(
        processes=processes,
        nodes=nodes,
        gpus=rollout.gpus_each,
        items=mine,
        episodes=mine * each,
        microbatches=microbatches,
        all_microbatches=all_microbatches,
        rollout_work=mine / items,
        update_work=microbatches / all_microbatches,
        split_base=split_base,
        sent_bytes={what: int(size) for what, size in sent.items()},
    )
