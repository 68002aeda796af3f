"""The reward of the recipe beside this file."""

import re


def right_sum(prompts, completions, messages, answer, **columns):
    """1 for each episode whose column totals make the right sum, 0 for any other.

    Every argument is a list with one entry an episode: `completions` has the text of the team's answer, `messages` all
    messages as they were spoken, and the dataset's columns come by name, here `answer`. TRL's reward functions work as they are.
    """
    return [float(read_sum(said) == str(right)) for said, right in zip(messages, answer, strict=True)]


def read_sum(messages):
    """The sum that two messages say: 4+8+0=12 (ones), then 3+5+1=9 (tens), is 92. Models write anything: no totals, no sum."""
    totals = [re.search("=([0-9]+)$", message["content"].strip()) for message in messages]
    if len(totals) != 2 or None in totals:
        return None
    ones, tens = totals
    return tens[1] + ones[1][-1]
