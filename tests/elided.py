"""Patterns for messages: tests compare keys, numbers and commands, but not the exact wording."""

import re


def elided(facts):
    """Return the regular expression of `facts`, a message in which "..." is any text (elided)."""
    return ".*".join(map(re.escape, facts.split("...")))
