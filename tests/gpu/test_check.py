"""The GPU check, tested without a GPU: any failure in a part is reported and does not affect other
parts, and a run that verified nothing says so."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from hpc3d.arrays.abstract import CostMeter
from hpc3d.cuda import launch_table
from hpc3d.ops.attention import HeadForm
from hpc3d.predict.calibration.calibrate import step_seconds
from hpc3d.predict.machine.machine import AttentionPass
from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.simulation.abstract_gpu import DeviceShapes
from hpc3d.predict.simulation.simulator import simulate
from tests.gpu import __main__ as command
from tests.gpu import benchmark, parent, rates
from tests.gpu.fake import Fake
from tests.gpu.guards import Overrun, guarded
from tests.gpu.notes import Notes, compared
from tests.gpu.parts import PARTS, Part
from tests.gpu.trainers import config_of

PLANTED = (sys.executable, "-m", "tests.gpu.planted")
HIDDEN = 'raise ModuleNotFoundError("hidden for a test", name=__name__)\n'


def planted(folder, name, seconds=20.0, case_limit=2.0):
    return parent.run(Part(name, seconds, case_limit), folder, seconds, command=PLANTED)


def outcomes(result):
    return {name: case["outcome"] for name, case in result["cases"].items()}


@pytest.mark.slow
def test_failures_in_one_case_do_not_affect_the_others(tmp_path, capfd):
    result = planted(tmp_path, "trouble")
    assert outcomes(result) == {
        "0 right": "passed",
        "1 wrong": "failed",
        "2 raises": "failed",
        "3 dies": "failed",
        "4 crashes": "failed",
        "5 hangs": "failed",
        "6 skips": "skipped",
        "7 right": "passed",
    }
    cases, printed = result["cases"], capfd.readouterr().out
    assert result["problem"] == ""
    assert cases["0 right"]["facts"]["figure"] == 1.5
    first, second = cases["1 wrong"]["checks"]
    assert first["first"] == {"at": [1, 1], "got": 4.0, "expected": 5.0}
    assert second["right"]
    assert 'raise RuntimeError("cublasLtMatmul' in cases["2 raises"]["traceback"]
    assert cases["3 dies"]["reason"] == "the process ended with 9"
    assert cases["4 crashes"]["reason"] == "the process ended with -11"
    assert "Segmentation fault" in result["printed"]
    assert cases["5 hangs"]["reason"].startswith("ended after 2 s")
    assert "failed  5 hangs" in printed
    command.show([result], 1.0)
    said = capfd.readouterr().out
    assert "trouble           2      5       1" in said
    assert "skipped trouble, 1 cases: nothing to do here" in said
    assert command.verdict([result], fake=False) == command.FAILED


@pytest.mark.slow
def test_swapped_slots_are_detected(tmp_path):
    result = planted(tmp_path, "misrouted", seconds=100.0, case_limit=60.0)
    case = result["cases"]["0 misroutes"]
    wrong = {check["what"].split()[0] for check in case["checks"] if not check["right"]}
    assert (case["outcome"], wrong) == ("failed", {"slots_of"})


@pytest.mark.slow
def test_cases_without_remaining_time_are_skipped(tmp_path):
    result = planted(tmp_path, "slow", seconds=1.8, case_limit=10.0)
    cases = result["cases"]
    found = outcomes(result)
    assert found["0 right"] == "passed"
    assert found["3 sleeps"] == found["4 right"] == "skipped"
    assert cases["4 right"]["reason"] == "no time left"
    assert "failed" not in found.values()


@pytest.mark.slow
def test_check_continues_in_a_new_process_after_a_lost_device(tmp_path):
    result = planted(tmp_path, "lost")
    first, wrong, second, third = result["cases"].values()
    assert wrong["outcome"] == "failed"
    assert first["facts"]["process"] != second["facts"]["process"] == third["facts"]["process"]
    assert result["problem"] == ""


def test_part_that_fails_to_start_is_a_problem(tmp_path):
    result = planted(tmp_path, "broken")
    assert result["problem"] == "its process ended with 1"
    assert "TypeError" in result["printed"]
    assert command.verdict([result], fake=False) == command.FAILED


def check(folder, *words, hide=()):
    """Run the check in its own process, in which the packages `hide` are missing."""
    for name in hide:
        (folder / f"{name}.py").write_text(HIDDEN)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    words = [sys.executable, "-m", "tests.gpu", "--json", folder / "found.json", *words]
    settings = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        words, cwd=parent.ROOT, env=settings, capture_output=True, text=True, check=False
    )
    found = json.loads((folder / "found.json").read_text())
    return done, {part["part"]: part for part in found["parts"]}


def test_check_without_cupy_verifies_nothing(tmp_path):
    done, parts = check(tmp_path, "--only", "nccl", hide=["cupy"])
    assert done.returncode == command.NOTHING, done.stdout
    assert done.stdout.splitlines()[-1] == "nothing is verified: no part ran on a GPU"
    assert parts["nccl"]["skipped"] == "no CuPy: hidden for a test"


@pytest.mark.slow
def test_environment_part_runs_without_cupy(tmp_path):
    done, parts = check(tmp_path, "--only", "environment", hide=["cupy"])
    assert done.returncode == command.NOTHING, done.stdout
    machine = parts["environment"]["cases"]["machine"]
    assert machine["outcome"] == "passed"
    assert machine["facts"]["python"] == sys.version.split()[0]
    assert not [c for c in parts["environment"]["cases"].values() if c["outcome"] == "failed"]


def test_lack_of_time_is_not_a_failure(tmp_path):
    done, parts = check(tmp_path, "--only", "loader", "--minutes", "0.01")
    assert done.returncode == command.NOTHING
    assert parts["loader"]["skipped"] == "no time left"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--json", "/proc/1/found.json"], "cannot write /proc/1/found.json"),
        (["--minutes", "-1"], "argument --minutes: -1: must be above 0"),
    ],
)
def test_invalid_option_is_reported_in_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(words)
    assert end.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_terminated_check_writes_its_results_and_leaves_no_process(tmp_path):
    found = tmp_path / "found.json"
    words = ["-m", "tests.gpu", "--fake", "--quick", "--only", "sizes", "products", "--json"]
    process = subprocess.Popen(
        [sys.executable, *words, found], cwd=parent.ROOT, stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("products:"):
            break
    process.terminate()
    rest = process.communicate(timeout=20)[0]
    assert process.returncode == 128 + signal.SIGTERM
    assert "ended before it was through" in rest
    assert [part["part"] for part in json.loads(found.read_text())["parts"]] == ["sizes"]


def run_on_a_fake(folder, *parts):
    done, found = check(folder, "--fake", "--quick", "--only", *parts)
    assert done.returncode == command.NOTHING, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "nothing is verified: this was a fake device"
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_parts_run_on_a_fake_device(tmp_path):
    """Parts that tests/simulated_cuda/test_cupy.py runs on CuPy are omitted."""
    names = [part.name for part in PARTS if part.name not in ("kernels", "sizes", "attention")]
    found = run_on_a_fake(tmp_path, *names)
    assert [*found] == names
    passed = {name for name, part in found.items() if "passed" in outcomes(part).values()}
    assert passed == {*found} - {"nccl"}
    assert [*outcomes(found["products"]).values()].count("passed") == 96
    assert outcomes(found["nccl"]) == {"NCCL": "skipped"}


class OneMillisecond(Fake):
    """Fake device on which every measured call takes a millisecond. Its attention has the widths
    and results of cuDNN's, but computes nothing."""

    def flash(self):
        def forward(qkv, sequence, form, causal):
            return qkv[:, : qkv.shape[1] // 3], None

        def backward(dout, qkv, out, stats, sequence, form, causal):
            assert out.shape == dout.shape

        return SimpleNamespace(suits=lambda *_: True, forward=forward, backward=backward)

    def seconds(self, function, repeats):
        function()
        return 1e-3


class Passes(CostMeter):
    """Meter of attention kernels on abstract arrays."""

    def __init__(self):
        self.flop = {}

    def attention(self, flop, nbytes, case, backward):
        passed = AttentionPass(case.width, case.sequence, case.causal, backward)
        self.flop[passed] = flop


def test_measured_attention_is_predicted_with_its_measured_time(tmp_path):
    notes, found = Notes(tmp_path / "events"), {}
    for width, causal in product(rates.WIDTHS, (True, False)):
        rates.attention(OneMillisecond(), rates.SMALL, found, width, causal, notes)
    rates.machine_file(Fake(), rates.SMALL, found, notes)
    notes.file.close()
    *_, last = map(json.loads, (tmp_path / "events").read_text().splitlines())
    (tmp_path / "gpu.toml").write_text(last["value"])
    machine, meter = load(tmp_path / "gpu.toml"), Passes()
    pool, small = DeviceShapes(meter), rates.SMALL
    for width, sequence, causal in product(rates.WIDTHS, small.sequences, (True, False)):
        flash, qkv = (
            pool.gpu.flash,
            pool.empty((small.tokens, 3 * small.columns), np.dtype("float16")),
        )
        out, stats = flash.forward(qkv, sequence, HeadForm(width), causal)
        flash.backward(out, qkv, out, stats, sequence, HeadForm(width), causal)
    assert len(meter.flop) == 16
    for passed, flop in meter.flop.items():
        seconds = machine.fused_attention(flop, 0, "float16", passed)
        assert seconds == pytest.approx(1e-3, rel=1e-3), passed


def test_predicted_step_takes_the_measured_time():
    how = {**benchmark.TINY, "batch": 1}
    config, machine = config_of("cupy", **how), load("h100")
    launching = replace(machine, host_s=rates.host_seconds(0.05, config, machine))
    predicted = step_seconds(simulate(config, config.model.vocabulary, launching))
    assert predicted == pytest.approx(0.05, rel=1e-6)


@pytest.mark.slow
def test_rates_of_a_fake_device_are_a_machine_file(tmp_path):
    run_on_a_fake(tmp_path, "rates")
    machine = load(tmp_path / "gpu-machine.toml")
    assert machine.name == "fake" and not machine.errors
    assert machine.gemm["float32"].flop == (2.0 * 16**3, 2.0 * 32**3)
    assert machine.links == load("h100").links


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_part_has_a_module_with_cases_or_run(part):
    module = import_module(f"tests.gpu.{part.name}")
    assert hasattr(module, "cases") or hasattr(module, "run")


def test_reserved_times_fit_into_nine_minutes():
    assert sum(part.reserved for part in PARTS) < 9 * 60 / 2
    assert all(part.reserved <= part.limit and part.case_limit <= part.limit for part in PARTS)


def add(x, y, out, size):
    out[...] = x + y


def write_behind(x, y, out, size):
    np.lib.stride_tricks.as_strided(out, (size + 1,))[size] = 0


def write_into_x(x, y, out, size):
    x[3] = 0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (write_behind, "out: wrote 4 bytes outside, first at byte 40"),
        (write_into_x, "x: is const, but byte 1[2-5] has changed"),
    ],
)
def test_guards_detect_out_of_bounds_writes(function, said):
    x, out = np.arange(1, 11, dtype=np.float32), np.zeros(10, np.float32)
    launch = guarded(Fake(), lambda name, rows, columns, **given: function(**given))
    with pytest.raises(Overrun, match=said):
        launch("add", 1, 10, x=x, y=x.copy(), out=out, size=10)


def test_guarded_launch_updates_the_host_arrays():
    memory = np.arange(13, dtype=np.float32)
    x, out = memory[3:], np.zeros(10, np.float32)
    seen = []

    def function(name, rows, columns, **given):
        seen.append(given["x"].ctypes.data % 16)
        add(**given)

    guarded(Fake(), function)("add", 1, 10, x=x, y=x.copy(), out=out, size=10)
    assert seen == [x.ctypes.data % 16]
    np.testing.assert_array_equal(out, 2 * x)
    assert launch_table.kernels()["add"].parameters["x"].startswith("const")


def test_comparison_locates_the_differences():
    expected = np.arange(6.0).reshape(2, 3)
    got = expected.copy()
    got[0, 2], got[1, 1] = np.nan, 5.0
    found = compared(got, expected, 1e-3, 0.0)
    assert not found["right"]
    assert (found["wrong"], found["not_finite"], found["first"]["at"]) == (2, 1, (0, 2))
    assert found["worst"] == {"at": (1, 1), "got": 5.0, "expected": 4.0}
    assert compared(expected + 1e-9, expected, 0.0, 1e-8)["right"]
    assert not compared(expected[0], expected, 1.0, 1.0)["right"]


def test_gpt_2_flops_per_token():
    """Per token: 6 x 123.6 M weights of products, and 113 M of attention."""
    shape = {**benchmark.GPT2, "batch": 1}
    assert benchmark.flops_of(shape) / 1024 == pytest.approx(854.7e6, rel=1e-3)


@pytest.mark.slow
def test_torch_baseline_reduces_the_loss():
    torch = pytest.importorskip("torch")
    from hpc3d.config.input_file import TrainConfig
    from tests.gpu.peer import Peer

    train = TrainConfig(learning_rate=1e-2)
    peer = Peer("cpu", torch.float32, train, (2, 16, 2, 8, 32))
    batch = np.random.default_rng(1).integers(0, 32, (2, 4, 8))
    losses = [peer.step(batch) for _ in range(20)]
    assert losses[0] == pytest.approx(np.log(32), abs=0.1)
    assert losses[-1] < losses[0] - 1


def test_make_gpu_check_runs_without_a_virtual_environment():
    words = ["make", "-n", "--no-print-directory", "gpu-check", "PYTHON=python9", "CHECK=--quick"]
    done = subprocess.run(words, cwd=parent.ROOT, capture_output=True, text=True, check=True)
    said = done.stdout.strip()
    assert said == "python9 -m tests.gpu --json results/gpu-check.json --quick"
