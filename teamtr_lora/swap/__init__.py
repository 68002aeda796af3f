"""Replacing one agent of a team, or the base under all of them, with Stage-0 alignment (app:align, prop:pnp).

Modules:
    replace        `swap`: one agent replaced, step by step
    rebase         `rebase`: a whole team moved to another base
    newcomer       the new adapter, wherever it comes from
    compatibility  whether it can take the agent's place
    probe_contexts  contexts in which the agent speaks, played by the old team
    stage0         the alignment: the new adapter learns the old policy
    session        what a swap and a rebase have in common, resumable
    shock          the team before, with the adapter as it came, and aligned
    places         run directories and registries, which take a replacement in one step
    swap_report    what is asked for, told on the way, and reported
"""
