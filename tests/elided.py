"""What a test may ask of a message: its key, its numbers and its commands, not its English."""

import re


def elided(facts):
    """A pattern of messages that have these facts; "..." is any English between them."""
    return ".*".join(map(re.escape, facts.split("...")))
