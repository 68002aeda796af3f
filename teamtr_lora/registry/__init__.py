"""Adapters and teams on disk: immutable versions, manifests, cards, what is imported and what goes to and comes from the hub."""
