"""Settings read from the configuration text of a trace, which may be any text."""

from types import SimpleNamespace

import pytest

from hpc3d.trace.trace_config import configured, one_time

TEXT = '[trace]\nclock = "processor"\n[train]\nsteps = 3\n'


def test_configured_returns_a_value_by_section_and_key():
    assert configured(TEXT, "train", "steps") == 3
    assert configured(TEXT, "train", "batch") is None
    assert configured(TEXT, "mesh", "x") is None


@pytest.mark.parametrize("text", ["", "no TOML at all", "train = 3", "[train", "\0"])
def test_unparsable_text_has_no_value(text):
    assert configured(text, "train", "steps") is None


@pytest.mark.parametrize(
    ("text", "same"), [(TEXT, False), ('[trace]\nclock = "wall"\n', True), ("", True)]
)
def test_cpu_time_is_not_common_to_all_ranks(text, same):
    assert one_time(SimpleNamespace(attrs={"config": text})) is same
