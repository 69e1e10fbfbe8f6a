"""Clock offsets between hosts are corrected, and hosts with the same name are rejected."""

import numpy as np
import pytest

import hpc3d.trace
from hpc3d.console.exit_codes import BAD_INPUT
from tests.hosts.emulated import Emulated
from tests.runs import newest, said, words

pytestmark = pytest.mark.hosts

AHEAD, BOUND = 5000, 5_000_000  # s, ns: of an exchange on a machine that is busy
EXCHANGES = 2000  # of a round, as many as there never must be


def test_clock_offsets_between_hosts_are_corrected(tmp_path):
    with Emulated(hosts=2, clocks=[(2, AHEAD)], shared=[tmp_path]) as hosts:
        line = words(tmp_path, train__steps=6, trace__sync_every=2, mesh__x=4)
        done = hosts.mpirun(
            (2, 2), "python", "-m", "hpc3d.train", *line, *("--mesh.y", "1", "--mesh.z", "1")
        )
        assert done.returncode == 0, done.stderr
    with hpc3d.trace.open(newest(tmp_path) / "trace.h5") as trace:
        samples, model = trace.clock_samples, trace.clock_model
        assert {*samples["rank"].tolist()} == {2} and {*samples["peer"].tolist()} == {0}
        _, counts = np.unique(samples["round"], return_counts=True)
        assert len(counts) == 4 and counts.max() < EXCHANGES
        for rank in range(4):
            offset = model["offset_ns"][model["rank"] == rank]
            assert np.abs(offset + AHEAD * 10**9 * (rank >= 2)).max() < BOUND
        names = [trace.strings[host] for host in trace.ranks["host_id"]]
        assert names == ["hn1", "hn1", "hn2", "hn2"]
        assert trace.attrs["missing"] == ""


@pytest.mark.parametrize("command", ["train", "doctor"])
def test_hosts_with_the_same_name_are_rejected(command, tmp_path):
    with Emulated(hosts=2, clocks=[(2, AHEAD)]) as hosts:
        for number in (1, 2):
            hosts.on(number, "hostname", "node")
        done = hosts.mpirun((2, 2), "python", "-m", f"hpc3d.{command}", timeout=120)
    line = said(done)[-1]
    assert line.startswith(f"hpc3d.{command}: ranks 0-1 and 2-3 are on different hosts")
    assert done.returncode == BAD_INPUT
