"""The verdict of a comparison: step times with intervals, losses, and groups of seeds."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from hpc3d import report
from hpc3d.analyze.metrics.compare import half_width, interval, relative_error
from hpc3d.analyze.run_comparison import (
    SeedGroup,
    comparison_verdict,
    distinct_labels,
    gain_rows,
    loss_references,
    repeated_seeds,
    scaling_table,
    seed_groups,
    seed_rows,
    speed_rows,
    with_references,
)
from tests.analyze.report.by_hand import limits, reported, write_run

SIZES = {"batch": 8, "layers": 2, "hidden": 8, "heads": 2, "sequence": 4, "block_weights": 100}
OTHER_WORK = "the step times of b and a are not compared, because "
STUDY = ("a", 8), ("b", 8), ("b", 16), ("a", 16), ("a", 32)  # layouts and hidden sizes
UNKNOWN = [None] * 9, [None] * 9  # the CPU time of other processes, and the workload
SAME = "is not significantly faster or slower than"
STEADY = np.array([1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0])


def run(name, ranks=4, **values):
    found = SIZES | {"run": name, "ranks": ranks, "setting": "same", "recompute": "none"}
    found |= dict.fromkeys(("forward_s", "backward_s", "average_step_s"))
    found |= dict.fromkeys(("step_s", "tokens_per_s", "tokens_per_s_rank", "flop_per_s"), 1.0)
    return found | values


def losses(name, difference, loss=3.0):
    steps = {"loss_step": 9, "difference_step": 9, "validation_step": 9, "validation_loss": None}
    return {"run": name, "loss": loss, "loss_difference": difference} | steps


def grouped(names, *groups):
    """Return one group per dict from seed to runs."""
    return [SeedGroup(name, each) for name, each in zip(names, groups, strict=True)]


def verdict(runs, seconds, differences, groups=None, busy=None):
    groups = groups or [SeedGroup(each["run"], {0: [index]}) for index, each in enumerate(runs)]
    rows = [losses(each["run"], far) for each, far in zip(runs, differences)]
    loads = [{key: each[key] for key in ("layers", "hidden", "setting")} for each in runs]
    speeds = speed_rows(runs, seconds, groups, busy or UNKNOWN[0], loads)
    return [*comparison_verdict(speeds, rows, groups)]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (STEADY / 1.08, "3d is 8.0% faster than 1d (95 % interval "),
        (STEADY * 1.25, "3d is 25.0% slower than 1d (95 % interval "),
        (STEADY / 3, "3d is 3.00 times as fast as 1d (95 % interval "),
        (STEADY * 49, "3d is 0.0204 times as fast as 1d (95 % interval 0.0199 to 0.0209)"),
        (STEADY * 1.001, f"3d {SAME} 1d: 0.1% slower (95 % interval -"),
        (STEADY[:2], "3d is 0.5% slower than 1d (too few steps for an interval)"),
    ],
)
def test_verdict_compares_step_times(seconds, said):
    (line,) = verdict([run("1d"), run("3d")], [STEADY, seconds], [0, None])
    assert line.startswith(said) and "losses" not in line


def test_verdict_states_the_interval_of_the_ratio():
    other = STEADY / 1.08
    limits = interval("r", 1.08, relative_error(STEADY), relative_error(other))
    (line,) = verdict([run("1d"), run("3d")], [STEADY, other], [0, 0])
    within = f"(95 % interval {limits['r_low'] - 1:.1%} to {limits['r_high'] - 1:.1%})"
    assert line == f"3d is 8.0% faster than 1d {within}; losses up to step 9 agree to the last bit"


@pytest.mark.parametrize(
    ("far", "said"),
    [
        (0.0, "losses up to step 9 agree to the last bit"),
        (2.9e-5, "losses up to step 9 agree to 3e-05 nat"),
        (3.1e-5, "losses up to step 9 differ by up to 3.1e-05 nat"),
    ],
)
def test_verdict_compares_losses(far, said):
    (line,) = verdict([run("1d"), run("3d")], [STEADY, STEADY], [0, far])
    assert line.endswith(f"; {said}")


@pytest.mark.parametrize(
    ("busy", "factor", "told"),
    [
        ([None, 0.12], 1.08, True),
        ([0.12, 0.0], 1.08, True),
        ([0.07, 0.01], 1.08, False),
        ([0.3, 0.92], 0.43, True),  # 57 % below the reference
        ([0.3, 0.56], 0.43, False),
    ],
)
def test_difference_that_other_processes_can_cause_is_called_so(busy, factor, told):
    (line,) = verdict([run("1d"), run("3d")], [STEADY, STEADY / factor], [0, 0], busy=busy)
    share = f"{max(each or 0 for each in busy):.0%}"
    clause = f"; other processes used {share} of the CPU time, which can cause this difference;"
    assert (clause in line) == told


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"ranks": 8}, "b is 2.00 times as fast as a on 8 ranks instead of 4 (95 % interval "),
        (
            {"ranks": 8, "batch": 16, "flop_per_s": 1.8, "step_s": 0.5},
            "b reaches 1.80 times the FLOP/s of a (95",
        ),
        ({"layers": 3}, OTHER_WORK + "layers differs"),
        ({"setting": "float64"}, OTHER_WORK + "setting differs"),
        (
            {"ranks": 8, "batch": 16, "flop_per_s": 0.99, "step_s": 0.5},
            "the FLOP/s of b and a do not differ significantly: 0.99 times (95 % interval ",
        ),
    ],
)
def test_verdict_depends_on_ranks_and_work(other, said):
    runs = [run("a"), run("b", **other)]
    (line,) = verdict(runs, [STEADY, STEADY / 2], [0, None])
    assert line.startswith(said)


def scaling(runs, groups=None, seconds=None):
    groups = groups or [SeedGroup(each["run"], {0: [index]}) for index, each in enumerate(runs)]
    speeds = speed_rows(runs, seconds or [STEADY] * len(runs), groups, *UNKNOWN)
    return scaling_table(runs, groups, speeds)


def test_scaling_is_only_reported_if_ranks_differ():
    same, more = scaling([run("a"), run("b")]), scaling([run("a"), run("b", 8)])
    assert [(row["scaling"], row["efficiency"]) for row in same] == [(None, None)] * 2
    assert [row["speedup"] for row in same] == [1, 1]
    assert [(row["scaling"], row["efficiency"]) for row in more] == [
        ("strong", 1),
        ("strong", 0.5),
    ]


def test_seeds_of_a_layout_are_one_row_of_the_scaling_table():
    runs = [run("a, 1", tokens_per_s=4.0), run("a, 2", step_s=4.0), run("b", 8)]
    groups = grouped(("a (2 seeds)", "b"), {1: [0], 2: [1]}, {1: [2]})
    rows = scaling(runs, groups, [STEADY, 4 * STEADY, STEADY])
    assert [(row["run"], row["step_s"]) for row in rows] == [("a (2 seeds)", 2.5), ("b", 1)]
    assert (rows[0]["speedup"], rows[0]["speedup_low"]) == (1, None)
    assert (rows[1]["speedup"], rows[0]["tokens_per_s"]) == (2.5, 4 / 2.5)
    errors = relative_error([*STEADY, *(4 * STEADY)]), relative_error(STEADY)
    assert rows[1]["speedup_low"] == interval("speedup", 2.5, *errors)["speedup_low"]


def test_gains_of_groups_are_the_ratios_of_the_verdict():
    """The 1-D run of the first seed is slower than the 3-D runs, but not the group."""
    names = "1d, 1", "1d, 2", "3d, 1", "3d, 2"
    times = [STEADY * each for each in (2.0, 1.0, 1.4, 1.8)]
    runs = [
        run(name, family=name[:2], p=1, d=1, average_step_s=each[0] / 8, step_s=each[0])
        for name, each in zip(names, times, strict=True)
    ]
    groups = grouped(("1d", "3d"), {1: [0], 2: [1]}, {1: [2], 2: [3]})
    speeds = speed_rows(runs, times, groups, *UNKNOWN)
    rows = scaling_table(runs, groups, speeds)
    passes = [each / 2 for each in times]
    one, other = gain_rows(rows, groups, {"step_s": times, "average_step_s": passes})
    assert (one["run"], other["run"], one["step_over_1d"]) == ("1d", "3d", None)
    for end in ("", "_low", "_high"):
        found = other[f"step_over_1d{end}"], other[f"over_1d{end}"]
        assert found == pytest.approx([speeds[1][f"speedup{end}"]] * 2)
    assert other["step_over_1d"] == 1.5 / 1.6


def test_weak_scaling_of_groups_compares_all_of_their_runs():
    runs = [run("a, 1"), run("a, 2", step_s=3.0), *([run("b", 8, batch=16, flop_per_s=2.0)] * 2)]
    groups = grouped("ab", {1: [0], 2: [1]}, {1: [2], 2: [3]})
    rows = scaling(runs, groups, [STEADY, 3 * STEADY, STEADY, STEADY])
    assert [row["scaling"] for row in rows] == ["strong", "weak"]
    assert (rows[1]["speedup"], rows[1]["efficiency"]) == pytest.approx((4, 2))


def test_groups_are_compared_with_the_same_layout_and_model_size():
    """The reference of each size has the layout of the first group, which need not be first."""
    runs = [
        run(f"{name}{size}", layout=name, hidden=size, block_weights=12 * size**2)
        for name, size in STUDY
    ]
    groups = [SeedGroup(each["run"], {0: [index]}) for index, each in enumerate(runs)]
    groups = with_references(groups, runs, *UNKNOWN)
    assert [group.comparable for group in groups] == [True] * 4 + [False]
    assert [group.reference for group in groups] == [0, 0, 3, 3, 0]
    lines = verdict(runs, [STEADY] * 5, [0] * 5, groups)
    assert [line.partition(":")[0] for line in lines[:2]] == [f"b8 {SAME} a8", f"b16 {SAME} a16"]
    (other,) = lines[2:]
    assert other.startswith(
        "the step times of a32 and a8 are not compared, because hidden differs;"
    )
    rows = scaling(runs, groups)
    assert [row["speedup"] for row in rows] == [1, 1, 1, 1, None]
    assert [row["reference"] for row in rows] == ["a8", "a8", "a16", "a16", "a8"]
    assert [row["speedup_low"] is None for row in rows] == [True, False, False, True, True]
    assert {row["reference"] for row in scaling(runs[:2])} == {None}


@pytest.mark.parametrize(
    ("study", "references"),
    [
        ([("a", 8, 2), ("a", 16, 2), ("b", 8, 8), ("b", 16, 8)], [0, 1, 0, 1]),
        ([("a", 8, 2), ("b", 16, 8)], [0, 0]),
        ([("a", 8, 2), ("b", 16, 8), ("c", 16, 8)], [0, 0, 0]),
    ],
)
def test_weak_scaling_needs_no_run_of_the_same_size_and_layout(study, references):
    """Each rank of the largest run has as many parameters as a rank of the first run."""
    runs = [
        run(f"{name}{n}", ranks, layout=name, hidden=n, block_weights=12 * n**2, p=1, d=1)
        for name, n, ranks in study
    ]
    groups = [SeedGroup(each["run"], {0: [index]}) for index, each in enumerate(runs)]
    groups = with_references(groups, runs, *UNKNOWN)
    assert [group.reference for group in groups] == references
    assert scaling(runs, groups)[-1]["scaling"] == ("strong" if len(runs) == 4 else "weak")


def test_efficiency_is_relative_to_the_ranks_of_the_reference():
    sizes = [("a", 8, 2), ("a", 16, 4), ("b", 16, 8)]
    runs = [
        run(f"{name}{n}", ranks, layout=name, hidden=n, block_weights=n**3, p=1, d=1)
        for name, n, ranks in sizes
    ]
    groups = [SeedGroup(each["run"], {0: [index]}) for index, each in enumerate(runs)]
    rows = scaling(runs, with_references(groups, runs, *UNKNOWN), [STEADY, STEADY, STEADY / 1.5])
    assert [row["efficiency"] for row in rows] == pytest.approx([1, 1, 0.75])


def trace_of(text):
    return SimpleNamespace(attrs={"config": text, "world_size": 1, "kind": "measured"})


def test_runs_that_differ_only_in_the_seed_form_a_group():
    texts = [
        "seed = 1",
        "seed = 2\n[mesh]\nx = 2",
        'seed = 3\nname = "other"\n[run]\nlabel = "a"',
        "[mesh]\nx = 2",
    ]
    labels = "a, 64-seed1", "b", "a, 64-seed3", "b, 2", "c", "d"
    groups = seed_groups([*map(trace_of, [*texts, "", ""])], labels, "ababcd")
    assert groups == grouped(
        ("a (2 seeds)", "b (2 seeds)", "c", "d"),
        {1: [0], 3: [2]},
        {2: [1], 1234: [3]},
        {None: [4]},
        {None: [5]},
    )


def test_groups_with_the_same_label_are_named_by_the_keys_in_which_they_differ():
    texts = [f"seed = {seed}\n[model]\nhidden = {n}" for n in (64, 128) for seed in (1, 2)]
    labels = [f"1d, x=4, ranks4-{number}" for number in range(4)]
    groups = seed_groups([*map(trace_of, texts)], labels, ["1d, x=4"] * 4)
    named = [group.label for group in groups]
    assert named == ["1d, x=4, hidden=64 (2 seeds)", "1d, x=4, hidden=128 (2 seeds)"]


def test_runs_with_the_same_label_are_named_by_the_keys_in_which_they_differ():
    texts = [f"seed = {seed}\n[train]\nbatch = {n}" for n in (4, 8) for seed in (1, 2)]
    texts += ["seed = 2\n[train]\nbatch = 8", "[model]\nlayers = 9", "", ""]
    labels, ids = [*["a"] * 5, "b", "c", "c"], [f"run{number}" for number in range(7)] + ["run6"]
    many = "a", "a", "seed = 1\n[train]\nbatch = 9\nsteps = 9\nclip = 9.0\nepsilon = 0.5"
    assert distinct_labels([*map(trace_of, texts)], labels, ids) == [
        *("a, seed=1, batch=4", "a, seed=2, batch=4", "a, seed=1, batch=8"),
        *("a, seed=2, batch=8, run3", "a, seed=2, batch=8, run4"),
        *("b", "c, run6, 7", "c, run6, 8"),
    ]
    pair = [*map(trace_of, ["seed = 2", many[2]])]
    assert distinct_labels(pair, many[:2], ids[:2]) == ["a, run0", "a, run1"]


def test_report_names_runs_by_their_labels(tmp_path, capsys):
    """Seeds of a label are one group, and the label is not reported as a difference."""
    labels = {"one": "3-D & ours", "two": "3-D & ours", "three": "1-D"}
    for number, (name, label) in enumerate(labels.items(), 1):
        keys = f"seed = {number % 2}\n[run]\nlabel = '{label}'\n"
        write_run(tmp_path / name, keys=keys, scheme="3d" if number < 3 else "1d")
    runs = [tmp_path / name for name in labels]
    found = reported(capsys, *runs, "--out", tmp_path / "out")
    names = ["3-D & ours, seed=1", "3-D & ours, seed=0", "1-D"]
    assert [run["label"] for run in found["runs"]] == names
    assert [row["run"] for row in found["scaling"]] == ["3-D & ours (2 seeds)", "1-D"]
    assert "run.label" not in str(found["differing"])
    for end, text in (("tex", r"3-D \& ours (2 seeds)"), ("csv", "3-D & ours (2 seeds)")):
        assert text in (tmp_path / "out" / "tables" / f"scaling.{end}").read_text()


def test_groups_of_seeds_are_compared_by_the_medians_of_their_runs():
    """Steps of a run are not independent: many steps of a run do not narrow the interval."""
    runs = [run(f"{name}, seed{seed}") for name in ("a, 64", "b") for seed in (1, 2, 3)]
    times = [1.0, 1.2, 1.1, 0.9, 1.0, 0.95]
    groups = grouped(("a, 64", "b"), {1: [0], 2: [1], 3: [2]}, {1: [3], 2: [4], 3: [5]})
    (line,) = verdict(runs, [STEADY * each for each in times], [0, *[0.5] * 5], groups)
    assert line.startswith(f"b {SAME} a, 64: 15.8% faster (95 % interval -")
    assert line.endswith("; the losses of each seed after step 9 agree to the last bit")
    runs[3:] = [each | {"ranks": 8} for each in runs[3:]]
    (line,) = verdict(runs, [STEADY * each for each in times], [0, *[0.5] * 5], groups)
    said = f"b {SAME} a, 64 on 8 ranks instead of 4: "
    assert line.startswith(said + "1.16 times as fast (95 % interval ")
    steps = [np.tile(STEADY, 100) * each for each in times]
    _, row = speed_rows(runs, steps, groups, *UNKNOWN)
    margin = half_width(np.array([1.0, 1.2, 1.1]) / 1.1, np.array([0.9, 1.0, 0.95]) / 0.95)
    limits = row["speedup_low"], row["speedup"], row["speedup_high"]
    assert limits == pytest.approx(1.1 / 0.95 * np.exp([-margin, 0, margin]))


@pytest.mark.parametrize(
    ("seeds", "other", "said"),
    [
        (2, {}, "b is 40.0% slower than a (2 seeds are too few for an interval)"),
        (1, {}, "b is 40.0% slower than a (2 runs are too few for an interval)"),
        (2, {"ranks": 8}, "b is 0.71 times as fast as a on 8 ranks instead of 4 (2 seeds are "),
        (2, {"ranks": 8, "batch": 16, "flop_per_s": 1.0}, "b reaches 0.71 "),
    ],
)
def test_step_times_of_two_samples_have_no_interval(seeds, other, said):
    runs = [run("a, 1"), run("a, 2"), run("b, 1", **other), run("b, 2", **other), run("b, 3")]
    members = ({1: [0], 2: [1]}, {1: [2], 2: [3], 3: [4]})
    groups = grouped("ab", *(members if seeds == 2 else ({1: [0, 1]}, {1: [2, 3, 4]})))
    times = [STEADY * each for each in (1.0, 1.2, 1.4, 1.6, 1.62)]
    (line,) = verdict(runs, times, [0, *[0.5] * 4], groups)
    assert said in line
    _, row = speed_rows(runs, times, groups, *UNKNOWN)
    assert (row["speedup_low"], row["speedup_high"]) == (None, None)


@pytest.mark.parametrize(
    ("values", "groups", "said"),
    [
        (
            [2.0, 2.02, 2.5, 2.52],
            ({1: [0], 2: [1]}, {1: [2], 3: [3]}),
            "b: mean loss 2.5100 instead of 2.0100 nat after step 9 "
            "(95 % interval of the difference 0.44 to 0.56)",
        ),
        (
            [2.0, 2.4, 2.4 + 1e-6, 2.0 - 4e-6],
            ({1: [0], 2: [1]}, {2: [2], 1: [3]}),
            "b: the losses of each seed after step 9 agree to 4e-06 nat",
        ),
        (
            [2.0, 2.4, 2.41, 1.99],
            ({1: [0], 2: [1]}, {2: [2], 1: [3]}),
            "b: the losses agree within the noise of the seeds: mean loss 2.2000 instead of 2.2000"
            " nat after step 9 (95 % interval of the paired difference -0.13 to 0.13)",
        ),
        (
            [2.0, 2.4, 2.52, 2.11],
            ({1: [0], 2: [1]}, {2: [2], 1: [3]}),
            "b: mean loss 2.3150 instead of 2.2000 nat after step 9 "
            "(95 % interval of the paired difference 0.051 to 0.18)",
        ),
        (
            [2.0, 2.02, 2.5],
            ({1: [0], 2: [1]}, {1: [2]}),
            "b: mean loss 2.5000 instead of 2.0100 nat after step 9"
            " (too few seeds for an interval)",
        ),
        ([2.0, None, 2.5, 2.52], ({1: [0], 2: [1]}, {1: [2], 3: [3]}), None),
        (
            [2.0, 2.02],
            ({1: [0], 2: [1]},),
            "all runs differ only in their seed, so they are one group",
        ),
        (
            [2.0, 2.02],
            ({1: [0, 1]},),
            "all runs have the same configuration and seed, so they are one group",
        ),
    ],
)
def test_verdict_compares_the_mean_losses_of_groups_of_seeds(values, groups, said):
    names = "a, 1", "a, 2", "b, 1", "b, 2"
    rows = [losses(name, None, value) for name, value in zip(names, values, strict=False)]
    assert [*comparison_verdict([], rows, grouped("ab"[: len(groups)], *groups))] == (
        [said] if said else []
    )


def test_losses_are_compared_with_the_run_of_the_same_seed_and_size():
    runs = [run(name) for name in ("a1", "a2", "a2 again", "b2", "b3")] + [run("c1", hidden=16)]
    seeds = {1: [0], 2: [1, 2]}, {2: [3], 3: [4]}, {1: [5]}
    groups = with_references(grouped("abc", *seeds), runs, *UNKNOWN)
    assert loss_references(groups) == {
        **{0: 0, 1: 1, 2: 1},
        **{3: 1, 4: None},
        5: None,
    }
    runs[5] |= {"hidden": None}  # the configuration is unknown
    groups = grouped("abc", *seeds[:2], {None: [5]})
    assert loss_references(with_references(groups, runs, *UNKNOWN))[5] == 0


def test_losses_of_runs_with_other_data_are_not_compared(tmp_path, capsys):
    """A separate validation text and the number of steps do not change the training data."""
    texts = ("[1, 1]", "'v.txt'"), ("[5, 1]", "'v.txt'"), ("[1, 1]", "'w.txt'")
    runs = []
    for number, (weights, validation) in enumerate(texts):
        data = f"path = ['a', 'b']\nweights = {weights}\nvalidation = {validation}"
        keys = f"[data]\n{data}\n[train]\nsteps = {3 + number}\n"
        runs.append(write_run(tmp_path / "abc"[number], keys=keys))
    rows = reported(capsys, *runs, "--out", tmp_path / "out")["comparison"]
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8").splitlines()
    other, same = text[4:6]
    assert " slower" in other or " faster" in other or " as fast" in other
    assert other.endswith(
        "; the losses are not compared, because the runs trained on different data: data.weights"
        " differs"
    )
    assert same.endswith("; losses up to step 2 agree to the last bit")
    assert [row["loss_difference"] for row in rows] == [0, None, 0]


@pytest.mark.parametrize(
    ("keys", "clause"),
    [
        ("[train]\nlearning_rate = 0.1\n", "train.learning_rate differs"),
        ("[train]\noptimizer = 'lion'\nbeta1 = 0.5\n", "train.optimizer and train.beta1 differ"),
        ("[mesh]\nd = 2\n[train]\neval_every = 9\n", None),
    ],
)
def test_verdict_names_the_keys_of_the_training_that_change_the_losses(
    keys, clause, tmp_path, capsys
):
    one = write_run(tmp_path / "one")
    other = write_run(tmp_path / "two", losses=(4.0, 3.75, 3.5), keys=keys)
    line = first_line(capsys, one, other)
    reason = f"; a difference is expected, because {clause}" if clause else ""
    assert line.endswith(f"; losses up to step 2 differ by up to 0.25 nat{reason}")
    same = write_run(tmp_path / "three", keys=keys)
    assert first_line(capsys, one, same).endswith("; losses up to step 2 agree to the last bit")


def first_line(capsys, *runs):
    assert report.main([*map(str, runs), "--tables"]) == 0
    return capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("seeds", "values", "expected"),
    [
        (({1: [0], 2: [1]}, {1: [2], 2: [3]}), (3, 4, 2, 3.5), "model.hidden differs"),
        (({1: [0]}, {2: [1]}), (3.0, 3.5), "seed differs"),
        (({1: [0], 2: [1]}, {1: [2], 2: [3]}), (3, 4, 2.5, 3.5), None),
        (({1: [0], 2: [1]}, {3: [2], 4: [3]}), (3, 3.01, 2.5, 2.51), "seed differs"),
        (({1: [0], 2: [1]}, {3: [2], 4: [3]}), (3, 4, 3.5, 3.51), None),  # within the noise
    ],
)
def test_verdict_names_the_seeds_or_the_size_that_change_the_losses(seeds, values, expected):
    """Losses of models of different sizes do not agree within the noise of the seeds."""
    sizes = [16 if expected == "model.hidden differs" and number > 1 else 8 for number in range(4)]
    runs = [run(str(number), hidden=size) for number, size in zip(range(len(values)), sizes)]
    training = [{"model.hidden": size} for size in sizes]
    groups = with_references(grouped("ab", *seeds), runs, UNKNOWN[0], training)
    rows = [losses(each["run"], None, value) for each, value in zip(runs, values)]
    (line,) = comparison_verdict([], rows, groups)
    *_, last = line.split("; ")
    assert (last == f"a difference is expected, because {expected}") == (expected is not None)
    assert ("because" in line) == (expected is not None)


def test_verdict_lists_the_losses_of_runs_with_different_seeds():
    rows = [losses("a", 0, 3.0), losses("b", None, 3.5)]
    assert [*comparison_verdict([], rows, grouped("ab", {1: [0]}, {2: [1]}))] == [
        "b: loss 3.5000 instead of 3.0000 nat after step 9 (too few seeds for an interval)"
    ]


def test_losses_of_a_group_of_seeds_are_averaged():
    rows = [losses("a", 0, 3.0), losses("a, 2", 1, 4.0), losses("c", 1, 2.0)]
    (row,) = seed_rows(rows, grouped("ac", {1: [0], 2: [1]}, {1: [2]}))
    assert (row["run"], row["runs"], row["loss"]) == ("a", 2, 3.5)
    assert row["loss_half"] == pytest.approx(12.706 * 0.5) and row["validation_loss"] is None


def test_runs_of_a_seed_are_one_sample():
    """A repeated run does not narrow the intervals of losses and step times."""
    labels = "a, 1", "a, 2", "a, 3", "a, 4", "b, 1", "b, 2", "b, 3"
    texts = [f"seed = {seed}" for seed in (1, 2, 2, 3)]
    texts += [f"seed = {seed}\n[mesh]\nx = 2" for seed in (1, 2, 3)]
    groups = seed_groups([*map(trace_of, texts)], labels, "aaaabbb")
    assert [group.label for group in groups] == ["a (3 seeds, 4 runs)", "b (3 seeds)"]
    values = 3, 4, 4, 5, 4, 4, 4
    (row, _) = seed_rows([losses(*each) for each in zip(labels, [0] * 7, values)], groups)
    assert (row["runs"], row["loss"]) == (3, 4)
    assert row["loss_half"] == pytest.approx(4.303 / 3**0.5)
    times = [STEADY * each for each in (1.0, 1.1, 1.21, 1.3, 0.9, 1.0, 1.1)]
    _, row = speed_rows([*map(run, labels)], times, groups, *UNKNOWN)
    mean = (1.0 + 1.155 + 1.3) / 3
    margin = half_width(np.array([1.0, 1.155, 1.3]) / mean, np.array([0.9, 1.0, 1.1]))
    assert row["speedup_high"] == pytest.approx(mean * np.exp(margin))
    (line,) = repeated_seeds(groups, labels)
    assert line.startswith("a, 3 repeats the configuration and seed of a, 2: ")


def test_report_counts_a_repeated_run_once(tmp_path, capsys):
    seeds = {"one": 1, "two": 1, "three": 2}
    runs = [write_run(tmp_path / name, keys=f"seed = {each}\n") for name, each in seeds.items()]
    found = reported(capsys, *runs)
    assert [row["runs"] for row in found["seeds"]] == [2]
    assert limits(found) == [
        "3d (shards only m and n), x=2 y=2, seed=1, two repeats the configuration and seed of 3d"
        " (shards only m and n), x=2 y=2, seed=1, one: the runs of a seed count as one sample"
    ]


def test_report_begins_with_the_verdict(tmp_path, capsys):
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "two", scheme="1d")
    reported(capsys, one, other, "--out", tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8").splitlines()
    assert text[:4] == [
        "# Report",
        "",
        "Verdict:",
        "",
    ]
    assert text[4] == (
        "* 1d, x=2 y=2 is 0.0% faster than 3d (shards only m and n), x=2 y=2 (too few steps for an"
        " interval); losses up to step 2 agree to the last bit"
    )


def test_reference_is_the_run_with_which_the_others_are_compared(tmp_path, capsys):
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "two", scheme="1d")
    words = [one, other, "--reference"]
    assert reported(capsys, *words, other)["runs"][0]["label"].startswith("1d, ")
    assert reported(capsys, *words, one)["runs"][0]["label"].startswith("3d ")
    assert report.main([*map(str, words), "three"]) == 2
    assert "--reference three: name one of the runs of this" in capsys.readouterr().err


def test_equal_runs_are_one_group_with_the_difference_of_their_losses(tmp_path, capsys):
    runs = [write_run(tmp_path / name) for name in ("one", "two")]
    assert report.main([*map(str, runs), "--tables", "--out", str(tmp_path / "out")]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        "all runs have the same configuration and seed, so they are one group; losses up to"
        " step 2 agree to the last bit"
    )


def test_comparison_warns_of_busy_hosts(tmp_path, capsys):
    runs = write_run(tmp_path / "one"), write_run(tmp_path / "two", scheme="1d")
    for path, share in zip(runs, (0.09, 0.25), strict=True):
        (path / "environment.json").write_text(json.dumps({"other_cpu_share": share}))
    found = reported(capsys, *runs)
    assert limits(found) == [
        "1d, x=2 y=2: other processes used 25% of the CPU time of the busiest host, so times may"
        " be longer"
    ]
    assert found["runs"][0]["about"]["other processes"] == "9% of the CPU time of the busiest host"
    (runs[0] / "environment.json").write_text('{"other_cpu_share": 0.3}')
    (line,) = limits(reported(capsys, *runs))
    assert line.startswith("all runs: other processes used 30% of the CPU time")
    (runs[0] / "environment.json").write_text("[")
    assert "other processes" not in reported(capsys, *runs)["runs"][0]["about"]
