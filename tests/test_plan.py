"""`python -m hpc3d.plan`: output, files, error messages and running time."""

import cProfile
import io
import json
import logging
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from hpc3d.plan import main
from hpc3d.predict.machine.machine_file import dumps
from hpc3d.predict.machine.machine_file import load as load_machine
from hpc3d.predict.simulation.simulator import simulate, step_length
from tests.predict.planning.test_adaptation import SLOW, TABLE
from tests.predict.planning.test_search import CLUSTER

INPUTS = Path(__file__).parent.parent / "inputs"
SMALL = [str(INPUTS / "gpt-3d-8.toml"), "--ranks", "8"]
HUGE = """
name = "gpt-175b"
[model]
layers = 96
hidden = 12288
heads = 96
sequence = 2048
vocabulary = 51200
[train]
batch = 1024
"""


def plan(capsys, *words):
    code = main([*words])
    out, err = capsys.readouterr()
    return code, out, err


def planned(capsys, *words):
    """Return the object in the last line."""
    code, out, err = plan(capsys, *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_first_layout_does_not_depend_on_the_number_shown(capsys):
    sizes = {"layers": 4, "hidden": 1024, "heads": 16, "sequence": 256, "vocabulary": 1024}
    words = [word for key, size in sizes.items() for word in (f"--model.{key}", str(size))]
    words += ["--train.batch", "8", "--train.dtype", "float16", "--machine", "a100-selene"]
    one, ten = (
        planned(capsys, str(INPUTS / "gpt-serial.toml"), "--ranks", "8", *words, "--top", top)
        for top in ("1", "10")
    )
    assert len(one["layouts"]) == 1 and one["layouts"] == ten["layouts"][:1]


@pytest.fixture(scope="module")
def best():
    """Lines of a plan with three layouts; the last one is an object."""
    with redirect_stdout(out := io.StringIO()):
        assert main([*SMALL, "--top", "3", "--json"]) == 0
    return out.getvalue().splitlines()


@pytest.mark.slow
def test_best_layouts_are_listed(best):
    *lines, _ = best
    assert lines[0] == "8 ranks of h100 (the default machine), 80.00 GB each"
    assert lines[2].split() == ["step", "memory", "bubble", "comm.", "axis", "layout"]
    assert [line.split()[0] for line in lines[3:6]] == ["1", "2", "3"]
    text = " ".join(lines)
    for part in (
        "any p and d",
        "1-D:",
        "2-D:",
        "cube:",
        "best cuboid:",
        "axis: mesh axis with the longest waiting time",
        "Why other layouts are slower",
        "~: estimated",
    ):
        assert part in text


@pytest.mark.slow
def test_groups_and_counts_cover_all_combinations(best):
    text = "\n".join(best)
    groups = re.findall(
        r"^ +(\d+) .*; ~?[\d.]+ m?s ", text.partition("\nWhy other")[2], re.MULTILINE
    )
    counts = re.findall(r"^ +(\d+) (?:estimated|excluded|less promising)", text, re.MULTILINE)
    assert sum(map(int, groups)) + 1 == int(counts[0])
    combinations = re.search(
        r"^([\d,]+) combinations of mesh sizes and scheme:", text, re.MULTILINE
    )
    assert sum(map(int, counts)) == int(combinations[1].replace(",", ""))


@pytest.mark.slow
def test_json_output_has_the_same_layouts(best):
    found = json.loads(best[-1])
    assert (found["machine"], found["ranks"], found["memory_bytes"]) == ("h100", 8, 80e9)
    steps = [row["step_time_s"] for row in found["layouts"]]
    assert len(steps) == 3 and steps == sorted(steps)
    assert all(row["peak_bytes"] <= 80e9 for row in found["layouts"])
    searched = found["searched"]
    assert searched["layouts"] > searched["estimates"] > searched["timed"] > 3
    assert sum(loser["count"] for loser in found["losers"]) == searched["timed"] - 1
    here, anywhere = (found["named"][key] for key in sorted(found["named"], reverse=True))
    assert anywhere.keys() == {"1-D", "2-D", "cube", "best cuboid"} == here.keys()
    assert here["cube"]["layout"]["mesh"] == {"x": 2, "y": 2, "z": 2}
    assert here["cube"]["step_time_s"] >= here["best cuboid"]["step_time_s"]
    assert all(anywhere[name]["step_time_s"] <= here[name]["step_time_s"] for name in here)


@pytest.mark.slow
def test_best_layout_is_written_as_an_input_file(capsys, tmp_path):
    path = tmp_path / "planned.toml"
    found = planned(
        capsys, *SMALL, "--model.layers", "4", "--memory", "30MB", "--apply", str(path)
    )
    config = resolve(load(path, []), 8)
    original = resolve(load(INPUTS / "gpt-3d-8.toml", ["--model.layers", "4"]), 8)
    assert (config.model, config.train, config.name) == (
        original.model,
        original.train,
        original.name,
    )
    best = found["layouts"][0]
    assert best["layout"]["parallel"]["microbatches"] > 1
    for table, values in best["layout"].items():
        for key, value in values.items():
            assert getattr(getattr(config, table), key) == value
    runs = simulate(config, 256, load_machine(INPUTS / "machines" / "h100.toml"))
    start, end = min(run.step[2] for run in runs), max(run.step[3] for run in runs)
    assert best["simulated"]
    assert best["step_time_s"] == pytest.approx((end - start) / 1e9, rel=1e-9)
    assert best["peak_bytes"] == max(run.peak["all"] for run in runs)
    assert found["applied"] == str(path)


@pytest.mark.slow
def test_uneven_layers_are_printed_and_written(capsys, tmp_path):
    machine, path = tmp_path / "slow.toml", tmp_path / "planned.toml"
    machine.write_text(dumps(SLOW))
    sizes = {"layers": 6, "hidden": 256, "heads": 8, "sequence": 128, "vocabulary": TABLE}
    words = [word for key, size in sizes.items() for word in (f"--model.{key}", str(size))]
    words += ["--train.batch", "32", "--machine", str(machine), "--apply", str(path), "--json"]
    code, out, _ = plan(capsys, str(INPUTS / "gpt-serial.toml"), "--ranks", "4", *words)
    *lines, last = out.splitlines()
    best, config = json.loads(last)["layouts"][0], resolve(load(path, []), 4)
    counts = best["layout"]["parallel"]["layers_per_stage"]
    assert code == 0 and sum(counts) == 6 and len({*counts}) > 1
    assert f"layers_per_stage=[{','.join(map(str, counts))}]" in lines[3]
    assert config.parallel.layers_per_stage == tuple(counts)
    seconds = step_length(simulate(config, TABLE, load_machine(machine))) / 1e9
    assert best["simulated"] and best["step_time_s"] == pytest.approx(seconds, rel=1e-9)


@pytest.mark.slow
def test_machine_file_and_memory_options(capsys, tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(dumps(CLUSTER))
    found = planned(capsys, *SMALL, "--machine", str(path))
    assert (found["machine"], found["memory_bytes"]) == ("nodes of 4", 16e9)
    less = planned(capsys, *SMALL, "--machine", str(path), "--memory", "15MB")
    assert less["memory_bytes"] == 15e6
    assert less["layouts"][0]["peak_bytes"] <= 15e6
    assert less["layouts"][0]["step_time_s"] > found["layouts"][0]["step_time_s"]
    assert "memory" in [loser["reason"] for loser in less["losers"]]


def test_single_rank_has_one_layout_of_no_named_scheme(capsys, tmp_path):
    """The input is the folder of a run."""
    (tmp_path / "config.toml").write_bytes(Path(SMALL[0]).read_bytes())
    code, out, err = plan(capsys, str(tmp_path), "--ranks", "1", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out.splitlines()[-1])
    assert len(found["layouts"]) == 1 and not found["losers"]
    assert set(found["named"]["any p and d"].values()) == {None}
    for where in found["named"]:
        assert f"With {where}, no layout of these schemes is valid: 1-D, 2-D" in out


def test_scheme_without_a_valid_layout_has_a_reason(capsys):
    sizes = {"layers": 2, "hidden": 48, "heads": 3, "sequence": 16, "vocabulary": 256}
    words = [f"--model.{key}={size}" for key, size in sizes.items()]
    words += ["--train.batch", "6", "--mesh.p", "1", "--mesh.d", "1"]
    code, out, _ = plan(capsys, SMALL[0], "--ranks", "6", *words, "--json")
    named = json.loads(out.splitlines()[-1])["named"]
    assert code == 0
    assert [rows["1-D"] is None for rows in named.values()] == [False, True]
    assert [rows["cube"] for rows in named.values()] == [None, None]
    assert out.count("\n1-D: none is valid; for example, model.heads = 3 must be divisible") == 1
    assert out.count("\ncube: none is valid; no searched mesh of 6 ranks has this shape\n") == 2


def test_written_layout_of_a_run_resumes_the_run(capsys, tmp_path):
    """A run without checkpoints cannot be resumed."""
    run = tmp_path / "a run"
    run.mkdir()
    (run / "config.toml").write_bytes(Path(SMALL[0]).read_bytes())
    for number, resume in enumerate(["", f" --resume '{run}'"]):
        path = tmp_path / f"{number}.toml"
        code, out, _ = plan(capsys, str(run), "--ranks", "1", "--apply", str(path))
        assert code == 0 and load(path, [])
        command = f"mpirun -np 1 python -m hpc3d.train {path}{resume}"
        assert out.endswith(f"\n{command}\n") and path.read_text().startswith(f"# {command}\n")
        (run / "checkpoints" / "step-00000001").mkdir(parents=True, exist_ok=True)


@pytest.mark.slow
def test_16384_ranks_can_be_planned(capsys, tmp_path):
    path = tmp_path / "gpt-175b.toml"
    path.write_text(HUGE)
    found = planned(capsys, str(path), "--train.batch", "4096", "--ranks", "16384")
    best = found["layouts"][0]
    assert best["simulated"] and best["peak_bytes"] <= 80e9


@pytest.mark.slow
def test_mixture_that_fits_no_gpu_uses_expert_and_tensor_parallelism(capsys):
    """The model has 600 billion parameters, on 512 H100 with 80 GB."""
    words = ["gshard-600b", "--ranks", "512", "--machine", "h100", "--json"]
    code, out, _ = plan(capsys, *words)
    found = json.loads(out.splitlines()[-1])
    assert code == 0 and 2 * found["mixture"]["parameters"] > 10 * found["memory_bytes"]
    assert "does not depend on the load balance" in out and "any p, d and e" in out
    best, cube = found["layouts"][0], found["named"]["any p, d and e"]["cube"]
    for row in (best, cube):
        assert row["layout"]["mesh"]["e"] > 1 and row["peak_bytes"] <= 80e9
    assert best["simulated"] and min(cube["layout"]["mesh"][axis] for axis in "xyz") > 1


def test_mixture_assumptions_are_printed(capsys):
    words = ["--model.experts", "4", "--model.top_k", "2", "--model.layers", "2"]
    code, out, _ = plan(capsys, SMALL[0], "--ranks", "2", *words, "--train.batch", "2")
    assert code == 0 and "are active per token" in out and "4 in 2 of 2 blocks, top_k 2" in out


@pytest.mark.parametrize("graph", ["true", "false"])
def test_cuda_graph_of_the_best_layout_is_printed(capsys, graph):
    words = ["--train.backend", "cupy", "--train.cuda_graph", graph, "--model.layers", "2"]
    code, out, _ = plan(capsys, SMALL[0], "--ranks", "2", *words, "--json")
    said = "one launch for " if graph == "true" else "none, because train.cuda_graph = false"
    assert code == 0 and f"\nCUDA graph of layout 1: {said}" in out
    best, *_ = json.loads(out.splitlines()[-1])["layouts"]
    assert best["cuda_graph"].startswith(said)


REFUSED = {
    "no layout on 7 ranks is valid for this model; ": ["--ranks", "7"],
    "no layout fits in 1.00 MB per rank; ": ["--ranks", "2", "--memory", "1MB"],
    "nothing.toml: no such machine": ["--machine", "nothing.toml"],
    "model.hiden: unknown key; did you mean model.hidden?": ["--model.hiden", "3"],
    "model.layers = 0: must be at least 1": ["--model.layers", "0"],
    "train.tf32 = true: only valid for train.backend = cupy": ["--train.tf32", "true"],
    "machine h100: no GEMM rates for float64": ["--train.dtype", "float64"],
    "--apply /no/folder/planned.toml: must be a file": ["--apply", "/no/folder/planned.toml"],
    "--apply /tmp: must be a file": ["--apply", "/tmp"],
    # the second error prevents that a plan without this check overwrites the file
    f"--apply {__file__} already exists; choose": ["--apply", __file__, "--model.layers", "0"],
    "64: unexpected argument": ["64"],
    "--csv found.csv: add --schedule search": ["--csv", "found.csv"],
    "--schedule cannot be combined with --apply": ["--schedule", "search", "--apply", "a.toml"],
    "--techniques cannot be combined with ": ["--schedule", "search", "--techniques"],
    "mesh.p = 1: --schedule search requires ": ["--schedule", "search"],
    "model.top_k = 9 ": ["--model.experts", "8", "--model.top_k", "9"],
    "model.top_k = 2: only valid for model.experts > 0; ": ["--model.top_k", "2"],
}


@pytest.mark.parametrize("line", REFUSED)
def test_invalid_input_is_rejected_in_one_line(capsys, line):
    code, out, err = plan(capsys, *SMALL, *REFUSED[line])
    assert (code, out) == (2, "")
    assert err.startswith(f"hpc3d.plan: {line}") and err.count("\n") == 1


@pytest.mark.slow
def test_rejection_suggests_a_memory_size_that_fits(capsys):
    _, _, err = plan(capsys, *SMALL, "--memory", "1MB")
    assert "the smallest layout found, " in err and "on stage 0 (" in err
    assert "activations and communication buffers " in err and "in flight" not in err
    words = re.findall(r"[ (](\d+)MB[ ,]", err)
    usual, least = map(int, words)
    for memory in (usual, least):
        code, out, _ = plan(capsys, *SMALL, "--memory", f"{memory}MB")
        assert code == 0 and f" {memory:.2f} MB each" in out
        assert ("No layout fits without offloading" in out) == (memory == least)
    code, *_ = plan(capsys, *SMALL, "--memory", f"{least - 1}MB")
    assert (code, least < usual) == (2, True)


@pytest.mark.parametrize("words", [["--ranks", "0"], ["--memory", "8KG"], ["--top", "none"]])
def test_invalid_options_are_rejected(capsys, words):
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, *words])
    assert ended.value.code == 2
    assert words[1] in capsys.readouterr().err


def test_all_invalid_keys_are_reported(capsys):
    words = ["--parallel.zero", "7", "--model.hiden", "3", "--train.steps", "0"]
    code, _, err = plan(capsys, *SMALL, *words, "--model.experts", "8", "--model.top_k", "9")
    said = [re.match(r"hpc3d.plan: ([\w.]+)", line)[1] for line in err.splitlines()]
    keys = ["parallel.zero", "model.hiden", "train.steps", "model.top_k"]
    assert code == 2 and said == keys


@pytest.fixture
def function_calls(monkeypatch):
    """Return the function calls of a plan in millions, a measure independent of the machine.

    Calls of imports, and calls with which pytest captures log records, are not counted.
    """
    assert main(SMALL) == 0  # imports the modules
    monkeypatch.setattr(logging.getLogger("hpc3d"), "propagate", False)
    return _function_calls


def _function_calls(*words):
    profile = cProfile.Profile()
    assert profile.runcall(main, [*words]) == 0
    return sum(entry.callcount for entry in profile.getstats()) / 1e6


@pytest.mark.slow
def test_planning_64_ranks_takes_few_function_calls(function_calls):
    assert function_calls(str(INPUTS / "gpt-3d-64.toml"), "--ranks", "64") < 4.2


@pytest.mark.slow
def test_planning_1024_ranks_takes_few_function_calls(function_calls, tmp_path):
    path = tmp_path / "gpt-175b.toml"
    path.write_text(HUGE)
    assert function_calls(str(path), "--ranks", "1024") < 28


@pytest.mark.slow
def test_techniques_are_evaluated_on_the_layout_of_the_input(capsys):
    found = planned(capsys, *SMALL, "--techniques", "--parallel.recompute", "full")
    first, *rest = found["techniques"]
    assert first["change"] == "as it is" and first["of_peak"] == 1
    changes = {row["change"]: row for row in rest}
    assert "parallel.recompute=full" not in changes
    assert changes["parallel.recompute=selective"]["of_peak"] > 1
    _, out, _ = plan(capsys, *SMALL, "--techniques", "--train.dtype", "float16")
    lines = out.splitlines()
    assert lines[0].startswith("8 ranks of h100 (the default machine); each row changes")
    assert "scheme=" in lines[1]
    assert "as it is" in lines[4] and "MB" in lines[4]
    assert any("keep_dtype=bfloat16" in line and "not possible: " in line for line in lines)
    assert any(line.endswith("no change") for line in lines)
    for words in (["--memory", "1GB"], ["--top", "3"], ["--apply", "planned.toml"]):
        code, _, err = plan(capsys, *SMALL, "--techniques", *words)
        assert code == 2 and "--techniques cannot be combined with --apply" in err
    code, _, err = plan(capsys, SMALL[0], "--ranks", "4", "--techniques")
    assert code == 2 and "= 8 ranks, but the job has 4 ranks; change [mesh], or use 8" in err


WITH = ["--model.layers", "2", "--memory"]  # and how much of it


def resorted(capsys, memory, path):
    """Return the lines, the object in the last line, and the written input."""
    words = [*SMALL, *WITH, memory, "--top", "2", "--apply", str(path), "--json"]
    code, out, _ = plan(capsys, *words)
    *lines, last = out.splitlines()
    assert code == 0
    return lines, json.loads(last), resolve(load(path, []), 8)


@pytest.mark.slow
def test_exact_technique_comes_first_if_nothing_fits(capsys, tmp_path):
    """The model requires 8.62 MB, of which AdamW's states are 3.88 MB."""
    lines, found, written = resorted(capsys, "8.5MB", tmp_path / "planned.toml")
    text = "\n".join(lines)
    assert "No layout fits without offloading or a change of the results: " in text
    assert 'below use parallel.offload=["optimizer"], which leaves results unchanged.' in text
    first = next(line for line in lines if line.startswith("  1"))
    assert first.startswith("  1 ") and "offload=[optimizer]" in first
    offload = {"parallel.offload": '["optimizer"]'}
    assert found["resort"]["with"] == {"changes": offload, "exact": True}
    assert found["resort"]["nearest"]["peak_bytes"] > 8.5e6
    others = [each["changes"] for each in found["resort"]["others"]]
    assert {"train.optimizer": "adamw-8bit"} in others and offload not in others
    assert found["layouts"][0]["peak_bytes"] <= 8.5e6
    assert written.parallel.offload == ("optimizer",)


@pytest.mark.slow
def test_technique_that_changes_results_is_marked(capsys, tmp_path):
    """8-bit moments change results less than Adafactor, so they come first."""
    lines, found, written = resorted(capsys, "7MB", tmp_path / "planned.toml")
    assert any("below use train.optimizer=adamw-8bit, which changes results." in x for x in lines)
    header = next(number for number, line in enumerate(lines) if line.lstrip().startswith("step "))
    assert [row[:4] for row in lines[header + 1 : header + 3]] == ["  1*", "  2*"]
    assert found["resort"]["with"]["exact"] is False
    assert written.train.optimizer == "adamw-8bit"
    runs = simulate(written, 256, load_machine(INPUTS / "machines" / "h100.toml"))
    assert found["layouts"][0]["peak_bytes"] == max(run.peak["all"] for run in runs) <= 7e6


@pytest.mark.slow
def test_plan_that_fits_uses_no_technique(capsys):
    found = planned(capsys, *SMALL, *WITH, "9MB")
    assert "resort" not in found and found["layouts"][0]["peak_bytes"] <= 9e6


def test_schedule_is_searched_for_and_written(capsys, tmp_path):
    file = str(tmp_path / "found.csv")
    words = ["gpt-4d-64", "--ranks", "64", "--schedule", "search", "--memory", "28MB"]
    code, out, err = plan(capsys, *words, "--csv", file, "--json")
    assert (code, err) == (0, "")
    *lines, last = out.splitlines()
    found = json.loads(last)["schedule"]
    assert 0 <= found["gap"] == found["makespan_s"] / found["bound_s"] - 1 < 0.05
    assert max(found["peak_bytes"]) <= 28e6 < max(found["input"]["peak_bytes"])
    assert found["step_time_s"] > found["makespan_s"]
    assert any(line.startswith("1f1b ") and line.endswith("does not fit") for line in lines)
    assert lines[-1].endswith(f"set parallel.schedule = csv:{file}")
    config = resolve(load("gpt-4d-64", ["--parallel.schedule", f"csv:{file}"]), 64)
    machine = load_machine("h100")
    runs = simulate(config, config.model.vocabulary, machine)
    assert [run.peak["all"] for run in runs] == found["peak_bytes"]
    assert step_length(runs) / 1e9 == pytest.approx(found["step_time_s"])
