"""The figures of a run: one function each, and one line each in the table below.

Modules:
    drawing     what a figure is, and the marks that figures are drawn with
    learning    is the team better?
    steps       were the steps safe, and did they gain?
    guarantees  what is guaranteed?
    freshness   did the data stay fresh?
    teamwork    do the agents work together?
    costs       what did it cost?
    comparison  several runs beside each other
"""

from __future__ import annotations

from dataclasses import dataclass, field

from teamtr_lora.report.figures import costs, freshness, guarantees, learning, steps, teamwork
from teamtr_lora.report.figures.drawing import Figure


@dataclass
class Section:
    """Figures that answer one question."""

    title: str
    figures: list[Figure] = field(default_factory=list)


SECTIONS = [
    Section("Is the team better?", [
        Figure("accuracy", "Accuracy on held-out items",
               "Higher is better; where the bars (95% intervals) of two stages do not overlap, the change is more than luck.",
               learning.accuracy),
        Figure("reward", "Reward while training",
               "Each point is the mean reward of the episodes that an update learned from, played by the team just before it.",
               learning.reward),
    ]),
    Section("Were the steps safe?", [
        Figure("kl_against_delta", "How far each update moved its agent",
               "Steps below the dashed line (delta) were allowed; the bars beneath show how much of the proposed step was taken.",
               steps.kl_against_delta),
        Figure("message_kl", "How single messages moved",
               "The trust region bounds the mean; the shaded parts show how far most messages moved and how far the last few.",
               steps.message_kl),
        Figure("gain", "What each update promised to gain",
               "Above zero an update looks better on episodes held out from it; below, the same for accepted steps in reward.",
               steps.gain),
        Figure("decisions", "What became of the updates",
               "A healthy run accepts most steps, shortens some, rejects few; hover to see why.",
               steps.decisions),
    ]),
    Section("What is guaranteed?", [
        Figure("certificates", "Certified against measured",
               "Triangles are what theory guarantees at the least; a cross is a vacuous bound, which excludes no outcome at all.",
               guarantees.certificates),
        Figure("certificate_terms", "What the certificate is made of",
               "The gain points up and the penalties that theory subtracts point down; their sum is the paper's bound.",
               guarantees.certificate_terms),
    ]),
    Section("Did the data stay fresh?", [
        Figure("staleness", "Staleness within a stage",
               "Only what rises above its pale neighbour (what noise alone would show) says that old episodes mislead.",
               freshness.staleness),
        Figure("gap", "Gap by place in the stage",
               "How wrong an update would be judged by episodes of the stage's first team; later places should be worse.",
               freshness.gap_by_place),
        Figure("context_drift", "Drift of what agents read",
               "How different the contexts are from those of the stage's first rollout, beside what two equal teams would show.",
               freshness.context_drift),
        Figure("importance", "Importance weights",
               "The share of old episodes that would still count if they were reweighted, and how large the weights become.",
               freshness.importance),
        Figure("token_shift", "Token probabilities by rank",
               "How much probability moved at the likeliest token, the second, and so on: little in region, much outside.",
               freshness.token_shift),
    ]),
    Section("Do the agents work together?", [
        Figure("coordination", "Right together",
               "Above the dashed line the agents are right on the same episodes more often than independent ones would be.",
               teamwork.coordination),
        Figure("alignment", "Aligning a replacement",
               "The new agent learns to speak like the old one; below the dashed line it is close enough to take over.",
               teamwork.alignment),
        Figure("shock", "What the replacement cost",
               "Accuracy before, with the new agent as it came, and with it aligned first: a drop is the shock of the swap.",
               teamwork.shock),
    ]),
    Section("What did it cost?", [
        Figure("seconds", "Where the time went",
               "Seconds of each stage by what they were spent on; idle is the time between phases.",
               costs.seconds_by_phase),
        Figure("speed", "Tokens per second",
               "Sampled tokens for each second of rollout, and learned tokens for each second of training.",
               costs.speed),
        Figure("memory", "Memory and tokens",
               "The largest memory that the process had needed by then, and all tokens sampled until then.",
               costs.memory),
    ]),
]  # fmt: skip


def add_figure(section: str, figure: Figure) -> None:
    """Puts a figure at the end of a section, which is made where there is none of that title. A figure of the same name goes."""
    found = next((known for known in SECTIONS if known.title == section), None)
    if found is None:
        found = Section(section)
        SECTIONS.append(found)
    found.figures[:] = [known for known in found.figures if known.name != figure.name] + [figure]
