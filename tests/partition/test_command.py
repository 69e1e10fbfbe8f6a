"""`python -m hpc3d.partition --graph`: its output and exit codes."""

import json
import re
from itertools import chain

import pytest

from hpc3d.partition.__main__ import main
from tests.partition.graphs import LOADS


@pytest.fixture
def costs(tmp_path):
    """Return the file of a chain of LOADS; each node has 2 bytes, and saves 1."""
    return costs_in(tmp_path, second=1, byte=1)


def costs_in(folder, second, byte):
    """Return the same file with other units."""
    memory = {"memory": 2 * byte, "saved": byte}
    nodes = [
        {"id": number, "forward": load * second, "backward": 2 * load * second, **memory}
        for number, load in enumerate(LOADS)
    ]
    ends = range(len(LOADS) - 1)
    edges = [{"from": number, "to": number + 1, "bytes": 3 * byte} for number in ends]
    path = folder / "costs.json"
    path.write_text(json.dumps({"nodes": nodes, "edges": edges}))
    return path


def planned(capsys, costs, *words):
    line = ["--graph", str(costs), "--ranks", "4", "--json", *words]
    code, printed = main(line), capsys.readouterr()
    return code, json.loads(printed.out.splitlines()[-1]) if code == 0 else printed.err


def test_boundary_between_two_nodes_has_no_other_location(tmp_path, capsys):
    path, nodes = tmp_path / "two.json", [{"id": n, "forward": 1, "backward": 2} for n in "ab"]
    path.write_text(json.dumps({"nodes": nodes, "edges": [{"from": "a", "to": "b", "bytes": 1}]}))
    assert main(["--graph", str(path), "--ranks", "2", "--microbatches", "8"]) == 0
    assert "a; no other location nearby is possible" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "time", "load"),
    [
        (("--microbatches", "8", "--schedule", "1f1b"), 573, 63),
        (("--microbatches", "8", "--schedule", "gpipe"), 600, 60),
        (("--microbatches", "8"), 573, 63),
        (("--microbatches", "8", "--objective", "load"), 600, 60),
        (("--objective", "load", "--bandwidth", "1.5"), 192, 62),
    ],
)
def test_command_finds_the_best_time_and_load(words, time, load, costs, capsys):
    code, found = planned(capsys, costs, *words)
    assert code == 0 and found["load"] == load and found["proven"]
    assert found["time"] == time
    assert [*chain.from_iterable(found["stages"])] == [*range(8)]
    assert found["replicas"] == [1] * len(found["stages"])


@pytest.mark.parametrize(
    ("second", "byte", "step", "load"),
    [
        (1e-6, 1, "0.573 ms", "0.063 ms"),
        (1e-3, 1e3, "573.000 ms", "63.000 ms"),
        (1e3, 1e12, "573000.000 s", "63000.000 s"),
    ],
)
def test_times_and_bytes_have_the_units_that_are_printed(
    second, byte, step, load, tmp_path, capsys
):
    costs = costs_in(tmp_path, second, byte)
    words = "--ranks", "4", "--microbatches", "8", "--schedule", "1f1b"
    assert main(["--graph", str(costs), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = "stage   forward [s]  backward [s]     in [MB]    out [MB] memory [MB]  nodes"
    rows = [[*map(float, line.split()[1:6])] for line in lines[lines.index(head) + 1 :][:4]]
    mb = byte / 1e6
    expected = [(21, 42, 0, 3, 18), (19, 38, 3, 3, 10), (9, 18, 3, 3, 8), (11, 22, 3, 0, 3)]
    units = second, second, mb, mb, mb
    for row, values in zip(rows, expected, strict=True):
        wanted = [value * unit for value, unit in zip(values, units, strict=True)]
        assert row == pytest.approx(wanted)
    assert f"step time       {step}" in lines
    assert f"busiest stage   {load} per microbatch, including messages" in lines
    for pattern, value in [
        (r"peak memory     (\S+) MB per rank", 18 * mb),
        (r" +1 +(\S+)  2; \S+ % if after 1.*", 3 * mb),
    ]:
        (found,) = filter(None, (re.fullmatch(pattern, line) for line in lines))
        assert float(found[1]) == pytest.approx(value)


def test_memory_counts_the_microbatches_in_flight(costs, capsys):
    """Stages have two nodes; all 4, or at most 4, 3, 2 and 1, of 8 microbatches are in flight."""
    words = "--microbatches", "8", "--memory"
    _, found = planned(capsys, costs, *words, "12B", "--schedule", "1f1b")
    assert found["memory"] <= 12 and found["proven"]
    flights = [min(8, 4 - stage) for stage in range(4)]
    held = [len(ids) * (2 + flight) for ids, flight in zip(found["stages"], flights)]
    assert max(held) == found["memory"]
    code, err = planned(capsys, costs, *words, "12B", "--schedule", "gpipe")
    (enough,) = re.findall(r"--memory (\d+B)", err)
    assert code == 2 and enough in ("20B", "21B")
    for objective in ("time", "load"):
        more = enough, "--schedule", "gpipe", "--objective", objective
        code, found = planned(capsys, costs, *words, *more)
        assert code == 0 and found["memory"] == 20


@pytest.mark.parametrize(
    "words",
    [("--ranks", "0"), ("--microbatches", "0"), ("--bandwidth", "fast"), ("--schedule", "2f2b")],
)
def test_invalid_graph_options_are_rejected(words, costs, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--graph", str(costs), "--ranks", "4", *words])
    assert ended.value.code == 2 and words[0] in capsys.readouterr().err


def test_missing_file_is_reported(tmp_path, capsys):
    assert main(["--graph", str(tmp_path / "none.json"), "--ranks", "2"]) == 2
    assert "none.json" in capsys.readouterr().err


def test_too_many_passes_are_rejected(costs, capsys):
    code, err = planned(capsys, costs, "--microbatches", "100000")
    assert code == 2 and "65536" in err and err.count("\n") == 1


def test_command_plans_a_module(capsys):
    pytest.importorskip("torch")
    words = "--ranks", "2", "--replicas", "1", "--batch", str(1 << 20), "--schedule", "1f1b"
    assert main(["inputs.partition.mlp:small", *words, "--json"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert [*map(len, found["stages"])] == [6, 6] and found["microbatches"] > 1
    assert found["replicas"] == [1, 1] and found["recompute"] == [False, False]
    assert found["pieces"] == [[*range(6)], [*range(6, 12)]] and found["chunks"] == 1
    assert found["borders"][0]["behind"] == found["stages"][0][-1] == "2.1/gelu_2"
    assert any("  2.1/gelu_2; " in line for line in text)


def test_command_accepts_replicas_per_stage_and_full_recomputation(capsys):
    pytest.importorskip("torch")
    words = (
        "--ranks",
        "4",
        "--replicas",
        "1,2",
        "--batch",
        "64",
        "--recompute",
        "full",
        "--zero",
        "1",
    )
    assert main(["inputs.partition.mlp:small", *words, "--margin", "0.2", "--json"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found["replicas"] == [1, 2] and found["zero"] == 1
    assert {*found["recompute"]} == {True}
    assert any("1 rank of 4 left idle" in line for line in text)
    stages = [line.split()[:3] for line in text if re.match(r" +[01] +[12] +yes", line)]
    assert {tuple(stage) for stage in stages} == {("0", "1", "yes"), ("1", "2", "yes")}


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("time_first", "100% of the compute time: .*, because transpose has no batch in dimens"),
        ("sized(64, 2)", "100% of the compute time: .*, because it is a single operation"),
        (
            "averages(read=True)",
            ".*, because 5 of its operations use the buffer ema, which add_ modifies .*models.py:",
        ),
    ],
)
def test_piece_that_leaves_ranks_idle_is_explained(model, line, capsys):
    pytest.importorskip("torch")
    assert main([f"tests.partition.sample_models:{model}", "--ranks", "4"]) == 0
    assert re.search(f"the largest piece takes {line}", capsys.readouterr().out)


@pytest.mark.parametrize(
    "words",
    [
        ("--replicas", "0"),
        ("--replicas", "2,"),
        ("--margin", "1"),
        ("--margin", "ten"),
        ("--zero", "2"),
        ("--recompute", "some"),
    ],
)
def test_invalid_module_options_are_rejected(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["inputs.partition.mlp:small", "--ranks", "4", *words])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and words[0] in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "either MODULE:FACTORY or --graph"),
        (("a:b", "--graph", "c"), "either MODULE:FACTORY or --graph"),
        (("a:b", "--bandwidth", "1GB"), "--bandwidth: valid only with --graph"),
        (
            ("--graph", "c", "--machine", "h100", "--draw", "d"),
            "--machine, --draw: not supported with --graph",
        ),
        (("--graph", "c", "--margin", "0"), "--margin: not supported with --graph"),
        (("--graph", "c", "--schedule", "zb-h1"), "use 1f1b or gpipe"),
        (("no.such.module:b",), "no module named no"),
        (("tests.partition.sample_models:decides",), "sample_models.py:"),
        (("tests.partition.sample_models:branches",), "relates different samples"),
        (("tests.partition.sample_models:mixed_types",), "float32 (bias), float64 (second); make"),
    ],
)
def test_impossible_plan_is_rejected_in_one_line(words, line, capsys):
    pytest.importorskip("torch")
    assert main([*words, "--ranks", "2"]) == 2
    err = capsys.readouterr().err
    assert line in err and err.count("\n") == 1


def test_all_options_that_a_graph_excludes_are_reported(capsys):
    pytest.importorskip("networkx")
    words = ["--graph", "c", "--zero", "1", "--schedule", "zb-h1", "--ranks", "2"]
    assert main(words) == 2
    assert re.fullmatch(r".*--zero: .*\n.*--schedule zb-h1: .*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("model", "line", "problem"),
    [
        (
            "tests.partition.sample_models:held",
            "none, so this plan cannot be run: the model must return its loss as a scalar",
            "without a loss, omit -o\n",
        ),
        ("inputs.partition.mlp:regression", "the returned tensor", ""),
    ],
)
def test_loss_is_named_and_required_for_a_plan_file(model, line, problem, capsys, tmp_path):
    pytest.importorskip("torch")
    words = model, "--ranks", "1", "--microbatches", "1"
    assert main([*words]) == 0
    assert f"\nloss            {line}" in capsys.readouterr().out
    assert main([*words, "-o", str(tmp_path / "plan.json")]) == (2 if problem else 0)
    err = capsys.readouterr().err
    assert err.endswith(problem) and err.count("\n") == len(problem.splitlines())


@pytest.mark.slow
def test_opaque_modules_are_listed(capsys, tmp_path):
    """Modules of the same class share a line; they have no source for torchrun."""
    pytest.importorskip("torch")
    model = "tests.partition.untraceable_models:of('Choosy', 'Choosy', 'Experts')"
    words = model, "--ranks", "2", "--replicas", "1", "--microbatches", "2"
    assert main([*words, "-o", str(tmp_path / "plan.json")]) == 0
    choosy, experts, *_ = capsys.readouterr().out.splitlines()
    assert re.match(r"parts.0 parts.1: .* \(the control flow or a tensor size depends on", choosy)
    assert re.match(r"parts.2: .* \(the size of a tensor depends on", experts)
    assert re.search(r"untraceable_models.py:\d+\)", choosy)
    assert main([*words, "-o", str(tmp_path / "plan.py")]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 3 and "parts.0: " in err[0] and "use -o PLAN.json" in err[0]
