"""`python -m hpc3d.simulate schedule`: output, files and error messages."""

import json
import subprocess
import sys

import pytest

from hpc3d.pipeline.schedule import SCHEDULES
from hpc3d.simulate import main

SMALL = ["--stages", "2", "--microbatches", "3"]


def simulate(capsys, *words):
    code = main(["schedule", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_schedule_diagram_and_measures_are_printed(capsys):
    code, out, err = simulate(capsys, "--name", "1f1b", *SMALL, "--forward", "2", "--weight", "0")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "1f1b: 2 stages, 3 microbatches, 1 chunk, 1 step",
        "",
        "0 |F0--- F1---    B0 F2--- B1       B2",
        "1 |      F0--- B0 F1--- B1 F2--- B2",
        "",
        "makespan        12 s",
        "pipeline bubble 25.00%",
        "in flight       2 1   (stage 0 first)",
        "waiting for W   0 0",
    ]
    _, out, _ = simulate(capsys, "--name", "1f1b", *SMALL)  # no times are given
    assert "\nmakespan        12 time units\n" in out


def test_json_is_one_object_on_the_last_line(capsys):
    times = ["--forward", "18.522", "--backward", "18.086", "--weight", "9.337", "--comm", "0.601"]
    sizes = ["--stages", "8", "--microbatches", "24"]
    _, out, _ = simulate(capsys, "--name", "zb-h1", *sizes, *times, "--json")
    found = json.loads(out.splitlines()[-1])
    assert found["bubble"] == pytest.approx(0.1585, abs=5e-5)
    assert found["in_flight"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert found["weight_inputs"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert found["makespan"] > 24 * (18.522 + 18.086 + 9.337)
    given = {"name": "zb-h1", "stages": 8, "microbatches": 24, "chunks": 1, "steps": 1}
    assert given.items() <= found.items()
    assert {"forward": 18.522, "comm": 0.601}.items() <= found.items()


def test_chunks_and_steps_options(capsys):
    _, out, _ = simulate(capsys, "--name", "interleaved", *SMALL, "--chunks", "3", "--json")
    assert json.loads(out.splitlines()[-1])["chunks"] == 3
    _, out, _ = simulate(capsys, "--name", "zb-v", *SMALL, "--json")
    assert json.loads(out.splitlines()[-1])["chunks"] == 2
    _, out, _ = simulate(capsys, "--name", "pipedream", *SMALL, "--steps", "2", "--json")
    assert json.loads(out.splitlines()[-1])["makespan"] == (6 + 1) * 3


@pytest.mark.parametrize("name", [s.name for s in SCHEDULES.values() if not s.asynchronous])
def test_schedule_round_trips_through_csv(capsys, tmp_path, name):
    sizes = ["--stages", "1" if name == "none" else "3", "--microbatches", "5"]
    file = tmp_path / "schedule.csv"
    code, first, _ = simulate(capsys, "--name", name, *sizes, "--comm", "0.5", "--csv", str(file))
    assert code == 0
    code, second, err = simulate(capsys, "--name", f"csv:{file}", *sizes, "--comm", "0.5")
    assert (code, err) == (0, "")
    assert second.splitlines()[1:] == first.splitlines()[1:]


def test_searched_schedule_is_written_to_a_file_that_can_be_read(capsys, tmp_path):
    file = tmp_path / "schedule.csv"
    sizes = ["--stages", "2", "--microbatches", "4", "--forward", "3,1", "--comm", "0.5"]
    words = ["--name", "search", "--memory", "2", "--csv", str(file)]
    code, first, _ = simulate(capsys, *words, *sizes)
    assert code == 0
    _, second, _ = simulate(capsys, "--name", f"csv:{file}", *sizes)
    lines = first.splitlines()
    [proven] = [line for line in lines if line.startswith("lower bound ")]
    assert proven.endswith(" s, proven gap 0.00%")
    assert second.splitlines()[1:] == [line for line in lines if line != proven][1:]


def test_schedule_figure_is_written(capsys, tmp_path):
    file = tmp_path / "schedule.png"
    code, _, _ = simulate(capsys, "--name", "pipedream", *SMALL, "--png", str(file))
    assert code == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--name", "1f1c", *SMALL], "--name '1f1c': did you mean 1f1b"),
        (
            ["--name", "none", *SMALL],
            "--stages 2: schedule none supports only one stage; use 1f1b or --stages 1",
        ),
        (["--name", "1f1b", *SMALL, "--chunks", "0"], "--chunks 0: must be at least 1"),
        (["--name", "1f1b", *SMALL, "--steps", "2"], "--steps 2: all steps of schedule 1f1b"),
        (["--name", "pipedream", *SMALL, "--steps", "0"], "--steps 0: must be at least 1"),
        (
            ["--name", "pipedream", *SMALL, "--csv", "x.csv"],
            "--csv x.csv: the steps of pipedream overlap",
        ),
        (
            ["--name", "csv:nowhere.csv", *SMALL],
            "--name csv:nowhere.csv: nowhere.csv: No such file",
        ),
        (
            ["--name", "interleaved", "--stages", "4", "--microbatches", "2"],
            "--microbatches 2: schedule interleaved needs at least one microbatch per stage; "
            "use 4 or more, or --stages 2",
        ),
        (["--name", "1f1b", *SMALL, "--csv", "no/where.csv"], "No such file"),
        (
            ["--name", "1f1b", *SMALL, "--forward", "0", "--backward", "0", "--weight", "0"],
            "are all 0",
        ),
        (
            ["--name", "1f1b", *SMALL, "--forward", "1,2,3"],
            "--forward: 3 values for 2 model chunks",
        ),
        (["--name", "gpipe", *SMALL, "--comm", "1,2"], "--comm: 2 values for 1 boundaries"),
        (["--name", "zb-v", *SMALL, "--weight", "1,2"], "--weight: 2 values for 4 model chunks"),
    ],
)
def test_invalid_input_is_one_line_and_exits_with_2(capsys, words, line):
    code, out, err = simulate(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("hpc3d.simulate: ")
    assert line in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("loads", "seconds"),
    [((21, 19, 5, 15), 573), ((19, 3, 18, 20), 600)],
)
def test_stages_may_have_different_times(loads, seconds, capsys):
    """Of two partitions of the loads 8 11 2 1 18 5 4 11, the better balanced one is slower."""
    times = ["--forward", ",".join(map(str, loads)), "--weight", "0"]
    times += ["--backward", ",".join(str(2 * load) for load in loads)]
    sizes = ["--stages", "4", "--microbatches", "8", "--json"]
    code, out, _ = simulate(capsys, "--name", "1f1b", *sizes, *times)
    assert code == 0 and json.loads(out.splitlines()[-1])["makespan"] == seconds


def test_single_time_is_per_stage_and_a_list_per_chunk(capsys):
    """Two chunks of 1 s form a stage of 2 s; a boundary takes its time in both directions."""
    line = ["--name", "interleaved", "--stages", "2", "--microbatches", "2", "--json"]
    found = []
    for forward, comm in (("2", "0.5"), ("1,1,1,1", "0.5,0.5,0.5")):
        _, out, _ = simulate(capsys, *line, "--forward", forward, "--comm", comm)
        found.append(json.loads(out.splitlines()[-1])["makespan"])
    assert found[0] == found[1]


def test_deadlocked_schedule_file_is_rejected(capsys, tmp_path):
    file = tmp_path / "schedule.csv"
    file.write_text("F0,B0,F1,B1\nF1,B1,F0,B0\n", encoding="utf-8")
    code, _, err = simulate(
        capsys, "--name", f"csv:{file}", "--stages", "2", "--microbatches", "2"
    )
    assert code == 2
    assert "deadlock: stage 0 at B0, stage 1 at F1" in err


@pytest.mark.parametrize("words", [[], ["schedule"], ["--forward=-1"], ["--comm", "nan"]])
def test_missing_and_invalid_options_are_rejected(capsys, words):
    prefix = ["schedule", "--name", "1f1b", *SMALL] if words and words[0] != "schedule" else []
    with pytest.raises(SystemExit) as exit:
        main([*prefix, *words])
    assert exit.value.code == 2


def test_help_lists_all_options_without_importing_numpy():
    command = [sys.executable, "-X", "importtime", "-m", "hpc3d.simulate", "schedule", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    options = (
        "name stages microbatches forward backward weight comm chunks steps memory png csv json"
    )
    assert all(f"--{option}" in done.stdout for option in options.split())
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"numpy", "matplotlib", "mpi4py", "pydantic"}


def test_run_that_has_not_been_trained_is_simulated_on_any_number_of_ranks(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.toml").write_text("[model]\nlayers = 2\n", encoding="utf-8")
    for chosen, said in ((["--machine", "h100"], ""), ([], " (the default machine)")):
        assert main([str(tmp_path), *chosen, "--ranks", "4"]) == 0
        assert capsys.readouterr().out.startswith(f"4 ranks of h100{said}: ")
    assert not [*tmp_path.glob("trace*")]


def test_folder_that_is_not_a_run_is_named_with_what_it_lacks(tmp_path, capsys):
    for options in [], ["--ranks", "4", "--mesh.x", "4"]:
        assert main([str(tmp_path), "--machine", "h100", *options]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"hpc3d.simulate: {tmp_path}: this folder has no config.toml; ")


@pytest.mark.parametrize(
    ("words", "begin"),
    [
        (["--parallel.sync", "blocking"], "a step in 16: "),
        (["--parallel.sync", "stale"], "overlaps with 16 steps, "),
        (["--parallel.sync", "stale", "--parallel.local_steps", "1"], "every step, stale: "),
    ],
)
def test_agreement_of_workers_is_described(words, begin, capsys):
    assert main(["gpt-local", "--machine", "h100-ethernet", *words]) == 0
    said = capsys.readouterr().out.splitlines()
    (line,) = [each for each in said if each.startswith("agreement")]
    assert line.split(maxsplit=1)[1].startswith(begin)
    assert "a rank receives 0.723 MB from other workers" in line
