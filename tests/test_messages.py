"""The golden file of messages is what the source says."""

from difflib import unified_diff

import pytest

from tests.messages import COMMAND, GOLDEN, lines, page

SOURCE = '''"""A module."""

def refuse(key, value):
    """Refuse a value."""
    raise ValueError(f"{key} = {value:.1f}: not {'a b'!r}; " "use 1\\nor more", key, b"as is")
'''


def test_messages_match_the_golden_file():
    old, new = GOLDEN.read_text(encoding="utf-8"), page()
    if old != new:
        changes = unified_diff(old.splitlines(), new.splitlines(), "reviewed", "source", n=0)
        told = "\n".join(changes)
        pytest.fail(f"{told}\nread the new lines as English, then: {COMMAND}", pytrace=False)


def test_message_extraction_yields_templates_but_no_docstrings():
    assert [*lines(SOURCE)] == ["{key} = {value}: not {'a b'}; use 1", "or more"]
