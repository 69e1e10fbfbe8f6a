"""Patterns of messages: tests compare keys, numbers and commands, not the wording."""

import re


def elided(facts):
    """Return the regular expression of `facts`, a message in which "..." is any text (elided)."""
    return ".*".join(map(re.escape, facts.split("...")))
