"""`python -m hpc3d.simulate INPUT --machine M`: output, files and error messages."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpc3d import trace
from hpc3d.analyze.metrics.critical_path import critical_path
from hpc3d.analyze.metrics.prediction import prediction_rows
from hpc3d.analyze.metrics.wait_states import calls_of
from hpc3d.report import main as report
from hpc3d.simulate import main
from tests.runs import train

ROOT = Path(__file__).parents[2]
INPUT = str(ROOT / "inputs" / "gpt-4d-64.toml")
MACHINE = ["--machine", str(ROOT / "inputs" / "machines" / "v100-4x16.toml")]


def simulate(capsys, *words):
    code = main([*map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_simulate_prints_step_time_memory_and_bytes(capsys):
    code, out, err = simulate(capsys, INPUT, *MACHINE, "--json")
    assert (code, err) == (0, "")
    assert "64 ranks of v100-4x16: p=4 d=2 x=2 y=2 z=2, scheme 3d, schedule 1f1b" in out
    found = json.loads(out.splitlines()[-1])
    wanted = (
        "machine ranks step_time_s tokens_per_s bubble communication flop mfu hfu memory bytes "
        "time sections"
    )
    assert [*found] == wanted.split()
    assert f"step            {found['step_time_s'] * 1e3:.3f} ms, " in out
    assert found["ranks"] == 64 and 0 < found["mfu"] < found["hfu"] + 1e-12 < 1
    assert found["tokens_per_s"] * found["step_time_s"] == pytest.approx(192 * 64)
    stages = found["memory"]["stages"]
    assert len(stages) == 4 and found["memory"]["worst"]["stage"] == 0
    assert found["memory"]["total"] == 16 * sum(stage["all"] for stage in stages)
    # Eight microbatches of 192 / (8 d x y) sequences of 64 tokens and 384 / 2 floats.
    assert found["bytes"]["p"]["recv"] == {"calls": 8, "bytes": 8 * 3 * 64 * 192 * 4}
    assert found["bytes"]["p"]["send"] == {"calls": 8, "bytes": 0}


def test_cuda_graph_of_a_step_is_printed(capsys):
    words = ["--train.backend", "cupy", "--train.cuda_graph", "true", "--mesh.transport"]
    _, out, _ = simulate(capsys, INPUT, *MACHINE, *words, "nccl")
    assert "\nCUDA graph      one launch for the forward and backward passes" in out
    _, out, _ = simulate(capsys, INPUT, *MACHINE, *words, "host-staged")
    assert "\nCUDA graph      none, because transport host-staged cannot be captured; " in out


def test_prediction_on_the_default_machine_names_it(capsys):
    _, out, _ = simulate(capsys, INPUT)
    head, (step, *lines) = out.splitlines()[0], out.partition("\n\n")[2].splitlines()
    assert head.startswith("64 ranks of h100 (the default machine): ")
    before = [line.split()[0] for line in [step, *lines[: lines.index("")]]]
    assert before[:2] == ["step", "MFU,"] and before[-1] == "interval"
    note = "(embeddings count as parameters, and logits as activations and communication buffers;"
    assert out.splitlines()[out.splitlines().index(note) + 1].endswith("exceed the peak of all)")


def test_options_override_the_input(capsys):
    words = [INPUT, *MACHINE, "--ranks", "128", "--mesh.d", "4", "--train.batch", "384", "--json"]
    assert json.loads(simulate(capsys, *words)[1].splitlines()[-1])["ranks"] == 128


@pytest.mark.slow
def test_simulated_trace_is_reported_like_a_measured_one(capsys, tmp_path):
    out = tmp_path / "simulated"
    code, said, _ = simulate(capsys, INPUT, *MACHINE, "--out", out, "--json")
    assert code == 0
    found = json.loads(said.splitlines()[-1])
    with trace.open(out / "trace.h5") as opened:
        assert len(opened.ranks) == 64 and opened.attrs["kind"] == "simulated"
        length = opened.steps["t_end"].max() - opened.steps["t_start"].min()
        path = critical_path(opened, calls_of(opened), 0)
        host = sum(piece.seconds for piece in path if piece.category == "host")
    assert length / 1e9 == pytest.approx(found["step_time_s"])
    assert host < 0.3 * found["step_time_s"]  # what lies between events, not what they wait for
    assert report([str(out), "--tables"]) == 0
    assert simulate(capsys, INPUT, *MACHINE, "--out", out)[0] == 2


@pytest.mark.slow
def test_prediction_is_stored_next_to_its_measurement(capsys, tmp_path):
    run = train(2, tmp_path, mesh__x=2, train__steps=2)
    machine = tmp_path / "machine.toml"
    text = Path(MACHINE[1]).read_text(encoding="utf-8")
    machine.write_text(text.replace("[gemm.float32]", "[gemm.float64]"), encoding="utf-8")
    code, out, err = simulate(capsys, run, "--machine", machine, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out.splitlines()[-1])
    with trace.open(run) as opened:
        quantities = dict(zip(opened.prediction["quantity"], opened.prediction["value"]))
        assert opened.attrs["kind"] == "measured" and len(opened.steps) == 4
        beside = {row["quantity"]: row["ratio"] for row in prediction_rows(opened)}
        assert {row["machine"] for row in prediction_rows(opened)} == {found["machine"]}
    assert beside["peak_all_bytes"] == 1.0
    assert quantities["step_s"] == found["step_time_s"]
    code, _, err = simulate(capsys, run, "--machine", machine, "--train.batch", "72")
    assert code == 2 and "is a run, whose settings are fixed; leave" in err
    assert quantities["peak_all_bytes"] == found["memory"]["stages"][0]["all"]


def test_all_wrong_options_for_a_run_are_reported(capsys, tmp_path):
    (tmp_path / "config.toml").touch()
    code, _, err = simulate(capsys, tmp_path, *MACHINE, "--ranks", "2", "--out", tmp_path)
    assert code == 2 and re.fullmatch(r".* leave out --ranks 2, .*\n.*--out .* exists; .*\n", err)


def test_rejection_of_other_settings_for_a_run_names_a_command_that_accepts_them(capsys, tmp_path):
    run = tmp_path / "my run"
    run.mkdir()
    (run / "config.toml").write_text(Path(INPUT).read_text(encoding="utf-8"), encoding="utf-8")
    changes = ["--parallel.recompute", "full"]
    code, _, err = simulate(capsys, run, *changes)
    command = err.partition(" predict other settings with ")[2]
    assert code == 2 and command.startswith("python -m hpc3d.simulate ")
    words = shlex.split(command)[3:]
    assert words == [f"{run}/config.toml", "--machine", "h100", *changes]
    assert simulate(capsys, *words)[0] == 0


def test_an_empty_configuration_of_a_run_is_refused(capsys, tmp_path):
    (tmp_path / "config.toml").touch()
    code, out, err = simulate(capsys, tmp_path, *MACHINE)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"{tmp_path / 'config.toml'}: empty or truncated" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent.toml", *MACHINE], "absent.toml: no such"),
        ([INPUT, "--machine", "absent.toml"], "absent.toml: no such"),
        (
            [str(ROOT / "inputs/gpt-dp-vs-pp.toml"), *MACHINE, "--mesh.d", "3"],
            "must be divisible by mesh.d = 3",
        ),
        ([INPUT, *MACHINE, "--mesh.q", "3"], "mesh.q: unknown key"),
        ([INPUT, *MACHINE, "--ranks", "65"], "65"),
        ([INPUT, *MACHINE, "--train.dtype", "float64"], "no GEMM rates for float64"),
        ([str(ROOT / "README.md"), *MACHINE], "README.md"),
        ([str(ROOT / "tests"), *MACHINE], "config.toml"),
    ],
)
def test_invalid_input_is_rejected_in_one_line(capsys, words, said):
    code, _, err = simulate(capsys, *words)
    assert code == 2 and said in err and "Traceback" not in err
    assert len(err.splitlines()) == 1


def test_wrong_input_and_wrong_machine_are_both_reported(capsys):
    code, _, err = simulate(capsys, "gpt-text", "--machine", "h1000")
    input_line, machine_line = err.splitlines()
    assert code == 2 and "add --ranks N" in input_line
    assert "h1000: no such machine; did you mean h100?" in machine_line


@pytest.mark.parametrize(
    "words",
    [
        ["hpc3d.simulate", INPUT, *MACHINE],
        pytest.param(
            ["hpc3d.plan", INPUT, *MACHINE, "--ranks", "2", "--model.layers", "1"],
            marks=pytest.mark.slow,
        ),
        ["hpc3d.report", "nowhere"],
        pytest.param(["hpc3d.prepare", "--verify", "nowhere"], marks=pytest.mark.slow),
        ["hpc3d.checkpoint", "show", "nowhere"],
    ],
    ids=lambda words: words[0],
)
def test_simulate_and_plan_run_without_mpi(words):
    module, *words = words
    code = f"import sys; sys.modules['mpi4py'] = None; from {module} import main; "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}sys.exit(main({words}))"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == (2 if "nowhere" in words else 0)


@pytest.mark.parametrize(
    "name",
    ["pp_vs_dp.findings", "megatron_report", "published_report", "tensor_3d", "vtrain_report"],
)
@pytest.mark.slow
def test_published_studies_import_without_mpi(name):
    code = f"import sys; sys.modules['mpi4py'] = None; import hpc3d.studies.{name}"
    subprocess.run([sys.executable, "-c", code], check=True)
