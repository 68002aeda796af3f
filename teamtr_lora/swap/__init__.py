"""Replacing one agent of a team, or the base under all of them, with Stage-0 alignment (app:align, prop:pnp)."""
