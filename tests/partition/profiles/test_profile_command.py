"""`python -m hpc3d.partition profile`, from the measurement to a plan based on it."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")

from hpc3d.partition import measured_profile
from hpc3d.partition.__main__ import main
from tests.mpi import checked, mpirun
from tests.partition.execution.modules import HERE, prepared

PROFILE = ("-m", "hpc3d.partition", "profile")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The file that two ranks have written, and their output."""
    path = tmp_path_factory.mktemp("profiles") / "profile.json"
    words = (f"{HERE}:in_double", "-o", path, "--repeats", 1)
    return path, checked(2, *PROFILE, *words)


@pytest.mark.slow
def test_profile_measures_every_piece_and_overhead(written):
    path, printed = written
    profile, (_, _, captured) = measured_profile.load(path), prepared(f"{HERE}:in_double")
    assert profile.ranks == 2 and profile.rows == [1, 2, 4, 8, 12]
    assert len(profile.pieces) == len(captured.pieces)
    assert min(profile.run.values()) >= 0 and profile.run["update"] > 0
    assert [each["op"] for each in profile.calls] == ["send", "all_reduce"]
    lines = [line.split() for line in printed.splitlines()]
    rows = [line[0] for line in lines if len(line) == 4 and line[0].isdecimal()]
    assert rows == ["1", "2", "4", "8", "12"]


@pytest.mark.slow
def test_plan_uses_the_seconds_of_the_profile(written, tmp_path, capsys):
    """One rank with one microbatch takes the sum of all pieces."""
    path, _ = written
    words = [f"{HERE}:in_double", "--profile", str(path), "--json"]
    plan = tmp_path / "plan.json"
    assert main([*words, "--ranks", "1", "--microbatches", "1", "-o", str(plan)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    profile = measured_profile.load(path)
    passes = sum(times[-1] for each in profile.pieces.values() for times in each)
    assert passes < found["time"] < passes + 1
    assert json.loads(plan.read_text())["predicted"]["machine"] == str(path)
    assert main([*words, "--ranks", "2", "--replicas", "1,1"]) == 0


@pytest.mark.slow
def test_profile_of_another_model_is_rejected(written, capsys):
    path, _ = written
    words = [f"{HERE}:chain", "--ranks", "2", "--profile", str(path)]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "partition profile again" in err and err.count("\n") == 1


@pytest.mark.slow
def test_unmeasurable_model_is_rejected_once(tmp_path):
    path = tmp_path / "none.json"
    done = mpirun(2, *PROFILE, "tests.partition.sample_models:held", "-o", path)
    line = "trained parameters must have the same data type"
    assert done.returncode == 2 and done.stderr.count(line) == 1 and not path.exists()
