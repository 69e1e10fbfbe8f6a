"""`python -m hpc3d.partition profile`, from the measurement to a plan based on it."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")
pytest.importorskip("ml_dtypes")

from hpc3d.comm import cartesian
from hpc3d.comm.device_setup import Hardware
from hpc3d.config.input_file import Config, MeshConfig
from hpc3d.console.sanitize import Problems
from hpc3d.partition import measured_profile
from hpc3d.partition.__main__ import main
from hpc3d.partition.execution import torch_device
from hpc3d.partition.profiles import __main__ as command
from tests.checkpoints.killed_runs import ThreadJob
from tests.fakes.fake_torch_cuda import TOTAL, FakeTorchCuda
from tests.mpi import checked, mpirun
from tests.partition.execution.modules import HERE, prepared
from tests.runs import said
from tests.training.test_on_devices import devices, ranks  # noqa: F401

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
    assert profile.ranks == 2 and profile.rows == [1, 2, 4, 8, 12] and profile.device == "CPU"
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
    predicted = json.loads(plan.read_text())["predicted"]
    assert (predicted["machine"], predicted["device"]) == (str(path), "CPU")
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


@pytest.mark.slow
def test_profile_without_cuda_is_rejected_in_one_line(tmp_path):
    words = (f"{HERE}:chain", "-o", tmp_path / "none.json", "--train.backend", "cupy")
    done = mpirun(2, *PROFILE, *words)
    (line,) = said(done)
    assert done.returncode == 2 and "finds no CUDA device; install a build of PyTorch" in line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--train.steps", "3"], r"--train.steps: .*use only train.backend, train.tf32, mesh"),
        (["--train.backend", "torch"], "train.backend"),
    ],
)
def test_only_keys_of_devices_are_accepted(words, line):
    with pytest.raises(ValueError, match=line):
        command._configuration(words)


class OneRank(ThreadJob):
    """Job of a single rank."""

    def __init__(self):
        super().__init__(SimpleNamespace(rank=0, ranks=1))

    def on_root(self, function):
        return function()

    on_all_ranks = on_root

    def location(self):
        return {"host": "here"}


GPU = SimpleNamespace(name="A GPU", number=0, bus="0000:01", uuid="7")


@pytest.fixture
def on_gpu(monkeypatch):
    """Function that profiles on a fake device, with the arguments of a command line."""
    FakeTorchCuda(monkeypatch)
    hardware = Hardware(GPU, "none", ("on A GPU; transport none",))
    monkeypatch.setattr(torch_device, "hardware", lambda job, config: hardware)
    monkeypatch.setattr(torch_device, "_share_stream", lambda device: None)
    monkeypatch.setattr(torch_device, "use_device", lambda *how: None)

    def profiled(*words):
        options = command.parser().parse_args([*map(str, words), "--repeats", "1"])

        def rank(mesh):
            monkeypatch.setattr(cartesian, "build_stages", lambda *how: (mesh, None))
            command._profile(OneRank(), options, ["--train.backend", "cupy"])

        ranks(Config(mesh=MeshConfig(x=1, y=1, z=1)), rank, "host-staged")

    return profiled


def test_profile_on_a_gpu_names_it_and_has_the_workspace(on_gpu, tmp_path, capsys):
    path, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    words = [f"{HERE}:chain", "--dtype", "bfloat16"]
    on_gpu(*words, "-o", path)
    assert capsys.readouterr().out.startswith("on A GPU; transport none\n")
    profile = measured_profile.load(path)
    assert (profile.device, profile.memory) == ("A GPU", TOTAL)
    assert {len(each) for each in profile.pieces.values()} == {3}
    assert main([*words, "--ranks", "1", "--profile", str(path), "-o", str(plan)]) == 0
    assert json.loads(plan.read_text())["predicted"]["device"] == "A GPU"


@pytest.mark.slow
def test_profile_on_a_gpu_rejects_float64(on_gpu, tmp_path):
    with pytest.raises(Problems, match="float64 is not supported by train"):
        on_gpu(f"{HERE}:in_double", "-o", tmp_path / "profile.json")
