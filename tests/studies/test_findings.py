"""All four findings, with fewer and smaller steps."""

from types import SimpleNamespace

import pytest

from hpc3d.studies.pp_vs_dp import figures, findings
from hpc3d.studies.pp_vs_dp.comparison import slowed
from hpc3d.studies.pp_vs_dp.message_sizes import microbatches
from hpc3d.studies.pp_vs_dp.strategies import strategies
from hpc3d.studies.pp_vs_dp.wait_times import waiting
from tests.predict.fixed import MACHINE
from tests.studies.small import APART, parted, small, summed


def few():
    """Return the tables of fewer and smaller steps."""
    cells = [
        small(machine, hidden, batch, 4)
        for machine in (APART, slowed(APART, 16))
        for hidden in (64, 128)
        for batch in (16, 64)
    ]
    return {
        "machine": MACHINE.name,
        "dtype": "float32",
        "races": cells,
        "by_microbatches": [small(APART, 128, 16, count) for count in (1, 4, 16)],
        "partitions": [row for rows in parted() for row in rows],
        "buckets": [row for rows in summed() for row in rows],
        "microbatches": microbatches(MACHINE, 512, 1, 512, 4, counts=(1, 8)),
        "waiting": waiting(MACHINE, 128, 4, ((2, 2), (3, 1))),
        "strategies": strategies(MACHINE, 2, 2, 128, 4, 16),
    }


def test_ends_returns_the_ratio_of_last_to_first_products():
    rows = [{"calls": 2, "message": 3}, {"calls": 0, "message": 0}, {"calls": 8, "message": 6}]
    assert findings.ends(rows, "calls", "message") == 8
    assert findings.ends(rows, "message") == 2


@pytest.mark.slow
def test_findings_are_printed_and_drawn(tmp_path, capsys):
    found = few()
    findings.report(found)
    text = capsys.readouterr().out
    titles = "1. Step time", "2. Memory", "3. Gradient reduction", "4. Uneven", "5. Side by side"
    for title in titles:
        assert title in text
    assert max(map(len, text.splitlines())) < 100
    ratios = [row["pipeline_s"] / row["data_s"] for row in found["by_microbatches"]]
    assert "   ratio        " + "".join(f"{each:7.2f}" for each in ratios) in text.splitlines()
    figures.write(found, tmp_path / "figures")
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    expected = ("pipeline-or-data", "partition", "message-size", "waiting")
    assert names == {f"{name}.{kind}" for name in expected for kind in ("png", "svg")}
    assert all(path.stat().st_size > 5_000 for path in (tmp_path / "figures").iterdir())


@pytest.mark.slow
def test_findings_on_h100():
    found = findings.main(SimpleNamespace(machine=None))
    near, far = found["races"][:20], found["races"][20:]
    for rows in (near, far):
        corners = {(row["hidden"], row["tokens"]): row["wins"] for row in rows}
        assert corners[8192, 4096] == "pipeline" and corners[512, 262144] == "data"
    wins = [sum(row["wins"] == "pipeline" for row in rows) for rows in (near, far)]
    assert 0 < wins[0] < wins[1] < 20
    worst = {row["partition"]: row["worst"] for row in found["partitions"]}
    assert worst["even"] < found["partitions"][0]["worst"] < worst["poor"]
