"""The variants of TeamTR that a recipe names: one axis a file, each with its small classes and the table of their names.

To add a variant, write a class in the file of its axis and a line in the table there; a script may also add a class of its own to
a table before it makes its TeamTRConfig. Recipes accept the names of the tables, the loop asks the objects, and nothing else
compares names. Nothing here imports torch or numpy, so that recipes can be checked without them.

    resampling  before which updates of a stage the team is sampled again, and whether old episodes are weighted
    matched     what items_per_stage counts: the items of each rollout, or of a whole stage
    publishing  when a new adapter version is played: at once (sequential), or at the end of the stage (joint)
    ordering    the order of the agents in a stage
    region      kinds of trust region: what penalises, stops, shortens or rejects a step
    radii       a stage's total radius, shared among the agents
    ratio       the unit of the importance ratio in the surrogate
    advantage_kinds  what is made of a return minus its group's mean
    gain        what is asked of a step's surrogate gain, beside its KL
    reuse       which episodes an update learns from, and which ones judge it
    reduction   the KL of a message, from that of its tokens
    optimizer_kinds  what takes the steps
    schedule    how a learning rate of the recipe's own changes over the stages
    chosen      all of them together, as a recipe chooses them
"""
