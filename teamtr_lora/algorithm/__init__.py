"""TeamTR's mathematics as pure functions of tensors and arrays; imports torch and numpy, and no other room of ours.

Shape suffixes: E episode, M message, N message token (flat), V vocabulary, D hidden.

    advantage     group-normalised advantages
    surrogate     the clipped surrogate
    token_kl      token KL: exact, k1 and k3
    trust_region  clustered upper bound, adaptive penalty, search for the step length
    radii         a stage's radii, shared among the agents
    certificate   improvement certificates from logged numbers
    calibration   how they did over a run
    local_gain    the largest gain that a small KL ball holds
    occupancy     occupancy shift, monitors, weights and stability, beside what noise gives
    lab           small exact teams, to check the theory on
"""
