"""The command `bench peers`, without the programs that it starts."""

import numpy as np
import pytest

from hpc3d import bench
from hpc3d.benchmarks import peers
from hpc3d.benchmarks.peers import Pair, PairedRuns, PeerRun, pairs
from hpc3d.console.sanitize import Problems


def test_rows_have_the_threads_of_each_peer():
    assert pairs(["eager", "ddp"], [1, 4], cores=2) == [
        Pair("eager", 1, 1),
        Pair("eager", 1, 2),
        Pair("ddp", 1, 2),
        Pair("ddp", 4, 1),
    ]
    assert pairs(["compile"], [4], cores=1) == [Pair("compile", 1, 1)]


@pytest.mark.parametrize(
    ("peer", "layers"), [("ddp", 4), ("1f1b", 8), ("interleaved", 16), ("eager", 4)]
)
def test_pipeline_has_one_layer_per_model_chunk(peer, layers, tmp_path):
    case = PairedRuns(Pair(peer, 1 if peer == "eager" else 8, 1), [], tmp_path)
    assert case.config.model.layers == layers
    assert not case.config.model.tied


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--peers", "ddp,horovod"], "horovod: must be one of eager, compile, ddp"),
        (["--model.tied", "true"], "--model.tied: peers sets this key"),
        (["--mesh.d=2"], "--mesh.d: peers sets this key"),
        (["--rounds", "0"], "0: must be an integer from 1 to "),
    ],
)
def test_invalid_options_are_rejected(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        raise SystemExit(bench.main(["peers", *words]))
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def case_of(monkeypatch, folder, ours, theirs):
    """A case whose runs have the given measurements."""
    case = PairedRuns(Pair("eager", 1, 1), ["--model.hidden=8", "--model.layers=1"], folder)
    monkeypatch.setattr(PairedRuns, "_run_ours", lambda self: ours[len(self.ours)])
    monkeypatch.setattr(PairedRuns, "_run_theirs", lambda self: theirs[len(self.theirs)])
    return case


def test_row_has_paired_medians_and_memory_without_libraries(monkeypatch, tmp_path):
    ours = [
        PeerRun([2.0, 1.0], step, 10.0, peak) for step, peak in ((1.0, 50), (2.0, 70), (9.0, 60))
    ]
    theirs = [PeerRun([2.0, 1.00001], step, 20.0, 100) for step in (2.0, 2.0, 3.0)]
    case = case_of(monkeypatch, tmp_path, ours, theirs)
    for _ in range(3):
        case.measure()
    row = case.row({"ours": 40, "theirs": 130})
    assert (row["ours_s"], row["theirs_s"], row["ratio"]) == (2.0, 2.0, 1.0)
    assert (row["ratio_min"], row["ratio_max"]) == (0.5, 3.0)
    assert (row["ours_received"], row["theirs_received"]) == (10.0, 20.0)
    assert (row["ours_peak"], row["theirs_peak"]) == (30, 0)
    assert row["difference"] == pytest.approx(1e-5, rel=1e-4)
    text = peers.markdown(peers._TABLE.fields, [row])
    assert "1.0e-05" in text


@pytest.mark.parametrize("other", [1.001, np.nan])
def test_different_losses_are_an_error(other, monkeypatch, tmp_path):
    runs = [[PeerRun([2.0, loss], 1.0, 0.0, 0)] for loss in (1.0, other)]
    with pytest.raises(Problems, match="the losses differ"):
        case_of(monkeypatch, tmp_path, *runs).measure()
