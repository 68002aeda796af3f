"""TeamTR's mathematics as pure tensor functions; imports torch and nothing of ours.

Shape suffixes: E episode, M message, N message token (flat), V vocabulary, D hidden.
"""
