"""From an accepted candidate's reading to the terms of its certificate (thm:single), on held-out episodes only."""

from __future__ import annotations

import math

import numpy as np
import torch

from teamtr_lora.algorithm.certificate import centred_surrogate, leave_one_out, zeta_proxies
from teamtr_lora.algorithm.clustered import ClusteredMean, mean_with_known_zeros
from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.runs.metrics import CertificateTerms
from teamtr_lora.team import Episode
from teamtr_lora.training.gate import CandidateReading, Judging
from teamtr_lora.training.rows import finite


def certificate_terms(
    reading: CandidateReading, judging: Judging, episodes: list[Episode], *, config: TeamTRConfig, gamma: float
) -> CertificateTerms:
    """`episodes` are those of the newest rollout, with which the arrays of `judging` begin; the terms are of those of them that
    judged the update. They are about the team's return, also where the agent learned from its own credit."""
    batch, groups = judging.batch, judging.groups
    held = [i for i, episode in enumerate(episodes) if episode.group in groups]
    number = {old: new for new, old in enumerate(held)}
    episode_M = np.array([number[i] for i in batch.episode_M.tolist()])
    group_E = np.array([episodes[i].group for i in held])
    discounted_E = np.array([episodes[i].discounted_return(gamma) for i in held])
    reward_E = np.array([episodes[i].reward for i in held])
    log_ratio_M = reading.log_ratio_M.double().numpy()

    read_E = judging.read_E[held]  # the gate reads some episodes of a group, and compares them with all of it
    weight_E = judging.weight_E[held] * read_E

    def surrogate(returns_E: np.ndarray) -> ClusteredMean:
        advantage_E = leave_one_out(returns_E, group_E)
        terms_E = weight_E * centred_surrogate(log_ratio_M, episode_M, advantage_E)
        even_E = ~np.isin(group_E, group_E[advantage_E != 0])
        terms, even, groups = (torch.from_numpy(each_E[read_E]) for each_E in (terms_E, even_E, group_E))
        return mean_with_known_zeros(terms, even, groups, config.trust_region.confidence)

    training, with_gamma, without = config.training, surrogate(discounted_E), surrogate(reward_E)
    turn_M = np.array([message.turn for message in batch.messages])
    kl_E = np.bincount(episode_M, (1 - gamma) * gamma**turn_M * reading.kl_M.double().numpy(), minlength=len(held))
    clipped_M = log_ratio_M.clip(math.log1p(-training.clip_ratio), math.log1p(training.clip_ratio))
    clipped_E = weight_E * centred_surrogate(clipped_M, episode_M, leave_one_out(discounted_E, group_E))
    zeta = zeta_proxies(
        discounted_E,
        group_E,
        episode_M,
        log_ratio_M,
        ratio_clip=training.clip_ratio,
        advantage_clip=training.advantage_clip,
        eps=training.advantage_eps,
    )
    return CertificateTerms(
        surrogate=with_gamma.mean,
        surrogate_standard_error=finite(with_gamma.standard_error),
        surrogate_undiscounted=without.mean,
        surrogate_undiscounted_standard_error=finite(without.standard_error),
        # over all episodes, as L is; the reading's is over those in which the agent spoke
        kl=float(np.average(kl_E, weights=weight_E)),
        turn_kl=_turn_kl(reading, episode_M, weight_E / weight_E.sum()),
        gamma=gamma,
        groups=len(groups),
        zeta_clip=zeta.clip,
        zeta_ratio=zeta.ratio,
        zeta_norm=zeta.norm,
        surrogate_clipped=float(clipped_E[read_E].mean()),
        surrogate_clipped_groups=[float(clipped_E[read_E & (group_E == group)].mean()) for group in sorted(groups)],
        largest_weight=float(weight_E.max()),
    )


def _turn_kl(reading: CandidateReading, episode_M: np.ndarray, share_E: np.ndarray) -> list[float]:
    """By the agent's first, second, ... message of an episode; 0 in episodes that did not reach it."""
    spoken = np.zeros(len(share_E), dtype=int)
    totals: list[float] = []
    for episode, kl in sorted(zip(episode_M.tolist(), reading.kl_M.tolist(), strict=True), key=lambda pair: pair[0]):
        place = spoken[episode]
        spoken[episode] += 1
        totals += [0.0] * (place + 1 - len(totals))
        totals[place] += kl * share_E[episode]
    return totals
