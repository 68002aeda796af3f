"""TeamTR's mathematics as pure functions of tensors and arrays; imports torch and numpy, and no other room of ours.

Shape suffixes: E episode, M message, N message token (flat), V vocabulary, D hidden.

    advantage     group-normalised advantages
    surrogate     the clipped surrogate
    token_kl      token KL: exact, k1 and k3
    clustered     a mean over dependent values, with its upper confidence bound
    trust_region  adaptive penalty, adaptive radius, search for the step length
    step_size     the learning rate that ends at the region's edge
    gradient_signal  how much of a gradient is not noise
    fixed_point   sums that do not depend on the order of what is added
    certificate   improvement certificates from logged numbers
    calibration   how they did over a run
    local_gain    the largest gain that a small KL ball holds
    head_statistics  scores of the training pass from two head products
    softmax_kernel  GPU kernels of both
    occupancy     occupancy shift, monitors, weights and stability, beside what noise gives

variants/ has the objects that a recipe names: resampling rules, kinds of trust region and so on.
"""
