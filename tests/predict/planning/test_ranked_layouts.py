"""Ranked layouts, as returned to a command or a program."""

import pytest

from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.planning.ranked_layouts import allowed, as_plain, ranked, searched

WORDS = ["--model.hidden", "32", "--model.heads", "4", "--model.layers", "2", "--train.batch", "8"]


def test_ranked_layouts_report_times_and_search_counts():
    config = allowed("gpt-3d-64", WORDS)
    found, ranking = ranked(config, 2, load("h100"), 1e9, top=3)
    rows = [as_plain(row) for row in ranking.best(3)]
    assert rows[0]["simulated"] and rows[0]["step_time_s"] <= rows[-1]["step_time_s"]
    assert {"mesh", "parallel"} <= rows[0]["layout"].keys()
    counts = searched(found, ranking)
    assert counts["simulated"] > 0 and counts["timed"] <= counts["layouts"]


@pytest.mark.parametrize("line", [
    "--train.steps 0",
    "--model.experts -1",
    "--parallel.compression_share 0",
    "--parallel.compression top-k --train.dtype float16",
])  # fmt: skip
def test_input_that_allows_no_layout_is_rejected(line):
    words = line.split()
    with pytest.raises(ValueError, match=words[0].removeprefix("--")):
        allowed("gpt-3d-64", words)
