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

from teamtr_lora.report.figures import costs, freshness, guarantees, learning, steps, teamwork
from teamtr_lora.report.figures.drawing import Figure

# The questions that figures answer: the headings of the page.
BETTER = "Is the team better?"
SAFE = "Were the steps safe?"
GUARANTEED = "What is guaranteed?"
FRESH = "Did the data stay fresh?"
TOGETHER = "Do the agents work together?"
COST = "What did it cost?"

# By the name of their files, in the order of the page.
FIGURES = {
    "accuracy": Figure(BETTER, "Accuracy on held-out items", learning.accuracy, read=
        "Higher is better; where the bars (95% intervals) of two stages do not overlap, the change is more than luck."),
    "reward": Figure(BETTER, "Reward while training", learning.reward, read=
        "Each point is the mean reward of an update's newest episodes, played by the team just before it."),
    "kl_against_delta": Figure(SAFE, "How far each update moved its agent", steps.kl_against_delta, read=
        "Steps below the dashed line (delta) were allowed; the bars beneath show how much of the proposed step was taken."),
    "message_kl": Figure(SAFE, "How single messages moved", steps.message_kl, read=
        "The trust region bounds the mean; the shaded parts show how far most messages moved and how far the last few."),
    "gain": Figure(SAFE, "What each update promised to gain", steps.gain, read=
        "Above zero an update looks better on episodes held out from it; below, the same for accepted steps in reward."),
    "decisions": Figure(SAFE, "What became of the updates", steps.decisions, read=
        "A healthy run accepts most steps, shortens some, rejects few; hover to see why."),
    "certificates": Figure(GUARANTEED, "Certified against measured", guarantees.certificates, read=
        "Triangles are what theory guarantees at the least; a cross is a vacuous bound, which excludes no outcome at all."),
    "certificate_terms": Figure(GUARANTEED, "What the certificate is made of", guarantees.certificate_terms, read=
        "The gain points up and the penalties that theory subtracts point down; their sum is the paper's bound."),
    "staleness": Figure(FRESH, "Staleness within a stage", freshness.staleness, read=
        "Only what rises above its pale neighbour (what noise alone would show) says that old episodes mislead."),
    "gap": Figure(FRESH, "Gap by place in the stage", freshness.gap_by_place, read=
        "How wrong an update would be judged by episodes of the stage's first team; later places should be worse."),
    "context_drift": Figure(FRESH, "Drift of what agents read", freshness.context_drift, read=
        "How different the contexts are from those of the stage's first rollout, beside what two equal teams would show."),
    "importance": Figure(FRESH, "Importance weights", freshness.importance, read=
        "The share of old episodes that would still count if they were reweighted, and how large the weights become."),
    "token_shift": Figure(FRESH, "Token probabilities by rank", freshness.token_shift, read=
        "How much probability moved at the likeliest token, the second, and so on: little in region, much outside."),
    "coordination": Figure(TOGETHER, "Right together", teamwork.coordination, read=
        "Above the dashed line the agents are right on the same episodes more often than independent ones would be."),
    "alignment": Figure(TOGETHER, "Aligning a replacement", teamwork.alignment, read=
        "The new agent learns to speak like the old one; below the dashed line it is close enough to take over."),
    "shock": Figure(TOGETHER, "What the replacement cost", teamwork.shock, read=
        "Accuracy before, with the new agent as it came, and with it aligned first: a drop is the shock of the swap."),
    "seconds": Figure(COST, "Where the time went", costs.seconds_by_phase, read=
        "Seconds of each stage by what they were spent on; idle is the time between phases."),
    "speed": Figure(COST, "Tokens per second", costs.speed, read=
        "Sampled tokens for each second of rollout, and learned tokens for each second of training."),
    "memory": Figure(COST, "Memory and tokens", costs.memory, read=
        "The largest memory that the process had needed by then, and all tokens sampled until then."),
}  # fmt: skip
