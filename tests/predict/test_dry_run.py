"""The dry run, which describes a run without starting it."""

import pytest

from hpc3d import train


@pytest.fixture
def said(capsys, tmp_path, monkeypatch):
    """Return a function that runs `train --dry-run` with other options, and returns its lines."""

    def lines(ranks, *words):
        monkeypatch.chdir(tmp_path)
        train.rehearse(ranks, ["--dry-run", *words])
        assert not [*tmp_path.iterdir()]
        return capsys.readouterr().out.splitlines()

    return lines


SMALL = ["--model.hidden", "64", "--model.heads", "8", "--train.batch", "24"]


def test_dry_run_prints_layout_memory_and_time_and_writes_nothing(said):
    lines = said(1, *SMALL, "--ranks", "4", "--machine", "v100-4x16", "--train.steps", "1000")
    assert lines[0] == "4 ranks: x=4"
    assert "by step 1, cosine from step 2 down to 0.0003 by step 1000" in "\n".join(lines)
    (memory,) = [line for line in lines if line.startswith("memory: ")]
    assert "fits in the 16 GB of a rank of v100-4x16" in memory
    (time,) = [line for line in lines if line.startswith("time on v100-4x16: ")]
    assert "for 1,000 steps" in time
    assert "nothing was written" in lines[-1] and "results/gpt-DATE" in lines[-1]


def test_machine_without_measurements_has_no_time(said, monkeypatch):
    monkeypatch.setattr("hpc3d.predict.dry_run.MEASURED", "never-measured")
    lines = said(2, *SMALL, "--train.dtype", "float64")  # of which h100.toml has no rates
    assert any("bench calibrate" in line for line in lines)


def test_measured_machine_has_a_time_only_for_its_types(said, monkeypatch):
    monkeypatch.setattr("hpc3d.predict.dry_run.MEASURED", "v100-4x16")
    monkeypatch.setattr("hpc3d.runtime.host_memory.total", lambda: 10**9)
    lines = said(2, *SMALL)
    assert any(line.startswith("time on v100-4x16: ") for line in lines)
    assert any("all ranks fit in the 1 GB" in line for line in lines)
    lines = said(2, *SMALL, "--train.dtype", "bfloat16")
    assert any("v100-4x16.toml has no GEMM rates for bfloat16" in line for line in lines)


@pytest.mark.parametrize(
    ("bytes_there", "verdict"), [(10**9, "all ranks fit in the 1 GB"), (10**7, "only 1 of 2 ")]
)
def test_dry_run_reports_whether_the_ranks_fit_on_this_machine(
    said, monkeypatch, bytes_there, verdict
):
    monkeypatch.setattr("hpc3d.runtime.host_memory.total", lambda: bytes_there)
    words = ["--mesh.p", "2", "--parallel.microbatches", "4", "--train.steps", "1000"]
    found = {line.partition(":")[0]: line for line in said(2, *SMALL, *words)}
    assert verdict in found["memory"]
    assert found["peak memory by stage"].count(" MB") == 2
    kinds = found["peak memory by kind, on the rank that needs the most"]
    assert "optimizer" in kinds
    assert "; communication buffers also hold the results of matrix products; " in kinds
    assert kinds.endswith("; the kinds peak at different times, so their sum can exceed the peak")


def test_dry_run_rejects_what_a_run_would_reject(said, monkeypatch):
    monkeypatch.setattr("hpc3d.runtime.host_memory.total", lambda: 10**6)
    with pytest.raises(ValueError, match=r"^model and train: 1 rank would use"):
        said(1, *SMALL)
    assert said(1, *SMALL, "--machine", "h100")


def test_invalid_file_of_this_machine_is_rejected(said, tmp_path_factory, monkeypatch):
    path = tmp_path_factory.mktemp("machine") / "wrong.toml"
    path.write_text("name = 3")
    monkeypatch.setattr("hpc3d.predict.dry_run.MEASURED", str(path))
    with pytest.raises(ValueError, match="name: "):
        said(1, *SMALL)


@pytest.mark.parametrize(
    ("ranks", "head"), [(1, "8 ranks: x=2 y=2 z=2"), (8, "8 ranks: x=2 y=2 z=2")]
)
def test_rank_count_defaults_to_the_mesh(said, ranks, head):
    cube = ["--mesh.x", "2", "--mesh.y", "2", "--mesh.z", "2", "--parallel.scheme", "3d-broadcast"]
    lines = said(ranks, *SMALL, *cube)
    assert lines[0] == head
    assert any("memory: peak of " in line for line in lines)


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--ranks", "0"], "--ranks 0: .* integer from 1"),
        (["--ranks"], "--ranks: the value is missing"),
        (["--machine", "nowhere"], "nowhere: no such machine"),
        (["--train.stepz", "1"], "train.stepz: unknown key"),
        (["--mesh.x", "3", "--ranks", "8"], "mesh: "),
        (["--data.path", "nowhere.txt"], "data.path: "),
        (["--run.metrics_hook", "nowhere:x"], "run.metrics_hook = 'nowhere:x': "),
    ],
)
def test_invalid_dry_run_options_are_rejected(said, words, wrong):
    with pytest.raises(ValueError, match=f"^{wrong}"):
        said(1, *words)
