"""The time and bytes of a checkpoint that are reported before the first step."""

import re
from collections import namedtuple

import pytest

from hpc3d.checkpoints import cost
from hpc3d.checkpoints.cost import Probe, seconds, shortage
from hpc3d.comm.threads import run
from tests.checkpoints.killed_runs import LAYOUTS, ThreadJob, run_until
from tests.elided import elided
from tests.pipeline.mixes import config_of, trainer_of


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forecast_bytes_match_the_checkpoint_files(layout, tmp_path):
    run_until(tmp_path, layout, 1)
    config = config_of(LAYOUTS[layout])

    def rank(mesh):
        return cost.forecast(ThreadJob(mesh), tmp_path, trainer_of(mesh, config), 2)

    lines, *others = run(config.sizes(), rank)
    assert all(other == lines for other in others)
    files = [path.stat().st_size for path in tmp_path.glob("checkpoints/*/*.bin")]
    told = f"{sum(files) / 1e6:.1f} MB ... {max(files) / 1e6:.1f} MB ... 2 "
    (line,) = lines
    assert re.search(elided(told), line)
    assert float(re.search(r" (\S+) s$", line)[1]) > 0
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "losses", "said"}


def test_checkpoint_time_is_that_of_the_busiest_node_plus_the_reread():
    """Node b writes 4 files and 30 bytes at the slowest rates; then 40 bytes are read."""
    ranks = [("a", 10), ("b", 10), ("b", 20)]
    probes = [Probe(file=1.0, write=0.5, digest=0.1), Probe(file=2.0, write=0.1, digest=0.2)]
    assert seconds(ranks, probes) == pytest.approx(4 * 2.0 + 30 * (0.5 + 0.2) + 40 * 0.2)


@pytest.mark.parametrize(("large", "write"), [(0.75, 0.0005), (0.25, 0.0), (0.2, 0.0)])
def test_probe_subtracts_the_small_file_time_from_the_large_file_time(
    large, write, tmp_path, monkeypatch
):
    """The large file has 1,000 bytes; the small file may accidentally take longer."""
    times = iter([0.25, large, 0.5])
    monkeypatch.setattr(cost, "timed", lambda function, *given: function(*given) or next(times))
    monkeypatch.setattr(cost.hashlib, "sha256", lambda block: None)
    found = cost.probe(tmp_path, "host", 1000)
    assert found == pytest.approx((0.25, write, 0.0005))
    assert not [*tmp_path.iterdir()]


def test_too_little_disk_space_is_reported(tmp_path, monkeypatch):
    """There is space for 2.5 checkpoints of 100 bytes, and one of them exists already."""
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(cost.shutil, "disk_usage", lambda _: usage(150_000_000))
    step = tmp_path / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    with (step / "rank-00000.bin").open("wb") as file:
        file.truncate(100_000_000)
    assert shortage(tmp_path, 100_000_000, keep=1) is None
    line = shortage(tmp_path, 100_000_000, keep=2)
    facts = f"checkpoints: 3 ... 300.0 MB, ... {tmp_path} ... 250.0 MB free; ... checkpoint.keep"
    assert re.fullmatch(elided(facts), line)
    assert shortage(tmp_path, 125_000_000, keep=1) is None  # just as much as there is
    assert shortage(tmp_path, 125_000_001, keep=1)


def test_folder_without_write_access_is_named(tmp_path):
    config = config_of(LAYOUTS["x=2"])

    def rank(mesh):
        cost.forecast(ThreadJob(mesh), tmp_path / "absent", trainer_of(mesh, config), 2)

    with pytest.raises(ValueError, match=r"absent: No such file"):
        run(config.sizes(), rank)
