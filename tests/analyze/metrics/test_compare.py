"""Comparison of runs: differences with known confidence intervals, and scaling."""

import math

import numpy as np
import pytest
from scipy import stats

from hpc3d.analyze.metrics.compare import (
    T95,
    difference_rows,
    interval,
    kind_of_scaling,
    received_rows,
    relative_error,
    run_row,
)
from hpc3d.analyze.metrics.steady import Steady
from hpc3d.analyze.run_comparison import SeedGroup, gain_rows, scaling_table, speed_rows
from hpc3d.config.load import to_toml
from tests.analyze.delayed_runs import trained
from tests.analyze.synthetic import by_hand, call, row
from tests.analyze.traces import config_of

ONE = {"compute": (90, 5, 6, 4, 5.5), "comm": (2, 2, 3, 2, 2)}  # ms in steps 0 to 4
OTHER = {"compute": (7, 8, 7.5), "comm": (60, 2.5, 2), "io": (1, 1, 1)}
DELAY = 0.1  # seconds of virtual time; all else takes microseconds


def run_of(path, times):
    """Return a run of two equally busy ranks, with steps of 100 ms."""
    rows, steps = [], {}
    for step in range(len(times["compute"])):
        for rank in (0, 1):
            begin = now = 100 * step
            steps[rank, step] = begin, begin + 100
            for category, spent in times.items():
                end = now + spent[step]
                if category == "comm":
                    rows.append(call(rank, "all_reduce", now, end, step, step=step))
                else:
                    rows.append(row(rank, now, end, category, step=step))
                now = end
    return Steady(by_hand(path, rows, steps, [("x", (0, 1))]))


@pytest.fixture
def pair(tmp_path):
    return run_of(tmp_path / "one.h5", ONE), run_of(tmp_path / "other.h5", OTHER)


def test_differences_compare_step_means_without_the_first_step(pair):
    rows = {each["category"]: each for each in difference_rows(*pair, ["category"])}
    wanted = {
        "compute": (np.mean([5, 6, 4, 5.5]), np.mean([8, 7.5])),
        "comm": (np.mean([2, 3, 2, 2]), np.mean([2.5, 2])),
        "io": (0, 1),
        "step": (100, 100),
        "unrecorded": (100 - 5.125 - 2.25, 100 - 7.75 - 2.25 - 1),
    }
    assert rows.keys() == wanted.keys()
    for category, (ours, theirs) in wanted.items():
        found = rows[category]
        assert found["seconds"] == pytest.approx(ours * 1e-3)
        assert found["other_seconds"] == pytest.approx(theirs * 1e-3)
        assert found["difference_s"] == pytest.approx((theirs - ours) * 1e-3)


def test_difference_rows_list_the_step_then_the_largest_difference(pair):
    rows = difference_rows(*pair, ["category"])
    assert [each["category"] for each in rows] == ["step", "unrecorded", "compute", "io", "comm"]
    whole, *others = difference_rows(*pair, ["category", "axis", "op"])
    assert (whole["category"], whole["axis"], whole["op"]) == ("step", "", "")
    for key in ("seconds", "other_seconds", "difference_s"):
        assert sum(each[key] for each in others) == pytest.approx(whole[key])


def test_difference_rows_work_without_the_category_key(pair):
    rows = difference_rows(*pair, ["axis"])
    found = {(each["category"], each["axis"]): each["seconds"] for each in rows}
    assert found == {
        ("step", ""): pytest.approx(0.1),
        ("recorded", ""): pytest.approx(5.125e-3),
        ("recorded", "x"): pytest.approx(2.25e-3),
        ("unrecorded", ""): pytest.approx(92.625e-3),
    }


def test_t_quantiles_match_students_distribution():
    """Two-sided 95 % quantiles for 1 to 30 degrees of freedom, to three decimals, from a table."""
    exact = stats.t.ppf(0.975, np.arange(1, 31))
    assert [*T95] == exact.round(3).tolist()


@pytest.mark.parametrize("counts", [(4, 2), (2, 2), (9, 30), (40, 60)])
def test_confidence_interval_is_welchs(tmp_path, counts):
    """The degrees of freedom are rounded down, so the interval is slightly wider than scipy's."""
    random = np.random.default_rng(counts[0])
    ours, theirs = (20 + random.normal(0, 1 + 2 * place, n) for place, n in enumerate(counts))
    traces = [
        run_of(tmp_path / f"{place}.h5", {"compute": (99, *times)})
        for place, times in enumerate((ours, theirs))
    ]
    found = next(
        each for each in difference_rows(*traces, ["category"]) if each["category"] == "compute"
    )
    exact = stats.ttest_ind(theirs, ours, equal_var=False).confidence_interval(0.95)
    middle = theirs.mean() - ours.mean()
    assert (found["low"] + found["high"]) * 500 == pytest.approx(middle, abs=1e-6)
    assert found["low"] * 1e3 <= exact.low + 1e-3 and found["high"] * 1e3 >= exact.high - 1e-3
    free = stats.ttest_ind(theirs, ours, equal_var=False).df
    wide = stats.t.ppf(0.975, min(int(free), 30)) / stats.t.ppf(0.975, free)
    assert (found["high"] - found["low"]) * 1e3 == pytest.approx(
        wide * (exact.high - exact.low), rel=2e-3
    )


def test_single_step_has_no_interval_and_equal_steps_a_zero_width(tmp_path, pair):
    single = run_of(tmp_path / "single.h5", {"compute": (5,)})
    assert {each["low"] for each in difference_rows(single, pair[0])} == {None}
    same = run_of(tmp_path / "same.h5", {"compute": (5, 6, 6)})
    other = run_of(tmp_path / "more.h5", {"compute": (5, 8, 8)})
    rows = {each["category"]: each for each in difference_rows(same, other, ["category"])}
    assert rows["compute"]["low"] == pytest.approx(2e-3) == rows["compute"]["high"]


@pytest.mark.parametrize("times", [(7,), (9, 7), (9, 6, 8)])
def test_differences_skip_the_first_step_if_there_are_others(times, tmp_path):
    trace = run_of(tmp_path / "t.h5", {"compute": times})
    rows = {each["category"]: each for each in difference_rows(trace, trace, ["category"])}
    assert rows["compute"]["seconds"] == pytest.approx(7e-3)


def test_difference_rows_find_a_slower_layer(tmp_path):
    """The layer is slower by 1 to 1.4 DELAY in steps 1 to 5."""

    def delay(recorder, name):
        slow = recorder.layer == 1 and recorder.phase == "forward"
        return (0.9 + 0.1 * recorder.step) * DELAY if slow and name == "gelu" else 0

    sizes = {"mesh__x": 2, "model__layers": 2, "parallel__scheme": "1d", "train__steps": 6}
    plain = Steady(trained(tmp_path / "plain", 2, **sizes))
    slow = Steady(trained(tmp_path / "slow", 2, delay, **sizes))
    whole, first, *_ = difference_rows(plain, slow, ("category", "phase", "layer"))
    assert (first["category"], first["phase"], first["layer"]) == ("compute", "forward", 1)
    mean, half = 1.2 * DELAY, T95[3] * 0.1 * DELAY * (2.5 / 5) ** 0.5
    for found in (first, whole):
        assert found["difference_s"] == pytest.approx(mean, rel=0.01), "of a rank and step"
        assert (found["low"], found["high"]) == pytest.approx((mean - half, mean + half), rel=0.01)


# Scaling


def scheme_of(
    path, name, mesh, batch=24, hidden=8, step=100, passes=(0.03, 0.05), flops=1e9, **values
):
    """Run of two steps with `flops` per rank and step, on a mesh {axis: size}, or on a number of
    ranks along x."""
    mesh = {"x": mesh} if isinstance(mesh, int) else mesh
    mesh, ranks = dict.fromkeys("pdxyz", 1) | mesh, math.prod(mesh.values())
    values |= {"parallel__scheme": name, "train__batch": batch, "model__hidden": hidden}
    values |= {f"mesh__{axis}": size for axis, size in mesh.items()}
    config = config_of(ranks, **{"model__heads": 8, **values})
    steps = {(rank, at): (1000 * at, 1000 * at + step) for rank in range(ranks) for at in (0, 1)}
    rows = [
        row(rank, at, at + 1, flops=flops, step=number)
        for (rank, number), (at, _) in steps.items()
    ]
    results = {"forward_s": passes[0], "backward_s": passes[1], "tokens": 4 * batch}
    text = {"config": to_toml(config), "axes": " ".join(mesh), "axis_sizes": [*mesh.values()]}
    return run_row(by_hand(path, rows, steps, results=results, **text))


SETTING = (
    "measured, model.kind = gpt2, model.vocabulary = None, model.tied = True, "
    "model.kv_heads = None, model.head_dim = None, model.ffn = None, "
    "model.norm_epsilon = 1e-05, model.attention_bias = False, model.mlp_bias = False, "
    "model.rope_theta = 10000.0, model.rope_window_theta = 10000.0, model.rope_fraction = 1.0, "
    "model.rope_scaling = None, model.query_scalar = None, model.score_cap = 0.0, "
    "model.logit_cap = 0.0, model.gelu = tanh, "
    "model.padding = None, model.window = 0, model.global_every = 0, model.dropout = 0.0, "
    "model.experts = 0, model.top_k = 1, "
    "model.capacity = 1.25, model.moe_every = 1, model.shared_experts = 0, "
    "model.balance_loss = 0.01, model.z_loss = 0.001, model.balance_bias = 0.0, "
    "train.optimizer = adamw, train.dtype = float32"
)


def test_run_row_of_a_hand_written_run(tmp_path):
    found = scheme_of(tmp_path / "t.h5", "1d", 2)
    assert found == {
        "run": "1d, x=2",
        "label": "",
        "layout": "1d",
        "family": "1d",
        "ranks": 2,
        "p": 1,
        "d": 1,
        "batch": 24,
        "layers": 8,
        "hidden": 8,
        "heads": 8,
        "sequence": 4,
        "recompute": "none",
        "block_weights": 8 * 768,
        "setting": SETTING,
        "forward_s": 0.03,
        "backward_s": 0.05,
        "average_step_s": pytest.approx(0.08 / 24),
        "step_s": pytest.approx(0.1),
        "tokens_per_s": pytest.approx(960),
        "tokens_per_s_rank": pytest.approx(480),
        "flop_per_s": pytest.approx(2e10),
    }


def scaling_rows(runs):
    """Return the rows of the scaling table of runs with different configurations."""
    groups = [SeedGroup(each["run"], {0: [index]}) for index, each in enumerate(runs)]
    seconds = [np.array([each["step_s"]]) for each in runs]
    rows = scaling_table(
        runs, groups, speed_rows(runs, seconds, groups, *[[None] * len(runs)] * 2)
    )
    return [row | {"scaling": kind_of_scaling(row, rows[0])} for row in rows]


def gains_of(runs):
    """Return the gains of runs with different configurations."""
    groups = [SeedGroup(each["run"], {0: [index]}) for index, each in enumerate(runs)]
    keys = "step_s", "average_step_s"
    times = {key: [np.array([each[key]]) for each in runs] for key in keys}
    return gain_rows(scaling_rows(runs), groups, times)


def test_strong_scaling_is_the_ratio_of_step_times(tmp_path):
    """The same work takes 100, 60 and 40 ms."""
    runs = [
        scheme_of(tmp_path / f"{ranks}.h5", "1d", ranks, step=step, flops=8e9 / ranks)
        for ranks, step in ((1, 100), (2, 60), (4, 40))
    ]
    rows = scaling_rows(runs)
    assert [each["scaling"] for each in rows] == ["strong"] * 3
    assert [each["speedup"] for each in rows] == pytest.approx([1, 100 / 60, 100 / 40])
    assert [each["efficiency"] for each in rows] == pytest.approx([1, 5 / 6, 5 / 8])


def test_simulated_run_has_no_speedup_over_a_measured_run(tmp_path):
    measured, simulated, again = (
        scheme_of(tmp_path / f"{n}.h5", "1d", 2, step=step) for n, step in enumerate((100, 1, 2))
    )
    for each in (simulated, again):
        each["setting"] = SETTING.replace("measured", "simulated")
    rows = scaling_rows([measured, simulated])
    assert [(each["scaling"], each["speedup"]) for each in rows] == [
        ("strong", 1),
        ("other", None),
    ]
    assert scaling_rows([simulated, again])[1]["speedup"] == pytest.approx(0.5)


def test_weak_scaling_requires_equal_work_per_rank(tmp_path):
    """Twice the batch on twice the ranks takes 5/4 of the time. The other cases have four times
    the parameters on two and on four times the ranks, and half the work."""
    runs = [
        scheme_of(tmp_path / "1.h5", "1d", 1),
        scheme_of(tmp_path / "2.h5", "1d", 2, batch=48, step=125),
        scheme_of(tmp_path / "3.h5", "1d", 2, hidden=16, step=200, flops=1.5e9),
        scheme_of(tmp_path / "4.h5", "1d", 4, hidden=16, step=200, flops=1.5e9),
        scheme_of(tmp_path / "5.h5", "1d", 1, batch=12, flops=5e8),
    ]
    rows = scaling_rows(runs)
    assert [each["scaling"] for each in rows] == ["strong", "weak", "other", "weak", "other"]
    assert [each["speedup"] for each in rows] == [
        1,
        pytest.approx(1.6),
        None,
        pytest.approx(3),
        None,
    ]
    assert [each["efficiency"] for each in rows] == [
        1,
        pytest.approx(0.8),
        None,
        pytest.approx(0.75),
        None,
    ]


@pytest.mark.parametrize(
    ("batch", "scaling"), [(44, "weak"), (43, "other"), (52, "weak"), (53, "other")]
)
def test_weak_scaling_allows_ten_percent_difference_in_work(batch, scaling, tmp_path):
    """Two ranks with 48 sequences have the same work per rank as one rank with 24."""
    one = scheme_of(tmp_path / "1.h5", "1d", 1)
    two = scheme_of(tmp_path / "2.h5", "1d", 2, batch=batch)
    assert [each["scaling"] for each in scaling_rows([one, two])] == ["strong", scaling]


FLAT, CUBE = {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2}


def test_gains_compare_with_the_best_run_of_each_other_scheme(tmp_path):
    """Forward and backward times by batch, as in arXiv:2105.14450, and step times."""
    runs = [
        scheme_of(tmp_path / "a.h5", "1d", 8, passes=(0.24, 0.24), step=500),  # 20 ms a sequence
        scheme_of(tmp_path / "b.h5", "1d-sequence", 8, passes=(0.18, 0.18), step=600),  # 15
        scheme_of(tmp_path / "c.h5", "2d", FLAT, passes=(0.10, 0.14), step=400),  # 10
        scheme_of(tmp_path / "d.h5", "3d", CUBE, passes=(0.06, 0.06), step=200),  # 5
    ]
    keys = ("over_1d", "over_2d", "step_over_1d", "step_over_2d")
    gains = [tuple(each[key] for key in keys) for each in gains_of(runs)]
    approx = [tuple(each and pytest.approx(each) for each in row) for row in [
        (None, 10 / 20, None, 4 / 5),
        (None, 10 / 15, None, 4 / 6),
        (1.5, None, 1.25, None),
        (3, 2, 2.5, 2),
    ]]  # fmt: skip
    assert gains == approx


@pytest.mark.parametrize(
    ("name", "mesh", "others"),
    [
        ("3d", {"x": 8}, {}),
        ("3d", {"p": 8}, {"parallel__schedule": "1f1b", "parallel__microbatches": 8}),
        ("3d", {"d": 8}, {}),
        ("3d", {"x": 2, "y": 1, "z": 2}, {}),
        ("3d", CUBE, {"batch": 48}),
        ("3d", CUBE, {"hidden": 16}),
        ("3d", CUBE, {"model__heads": 4}),
        ("3d", {"d": 2, "x": 2, "z": 2}, {}),
    ],
)
def test_runs_of_other_layouts_or_sizes_have_no_gain(tmp_path, name, mesh, others):
    runs = [
        scheme_of(tmp_path / "a.h5", "1d", 8, passes=(0.24, 0.24)),
        scheme_of(tmp_path / "b.h5", name, mesh, passes=(0.06, 0.06), **others),
    ]
    assert gains_of(runs) == []


@pytest.mark.parametrize(
    "other", [{"train__dtype": "float64"}, {"model__vocabulary": 99}, {"train__optimizer": "sgd"}]
)
def test_runs_with_different_workloads_have_no_speedup_and_no_gain(tmp_path, other):
    runs = [
        scheme_of(tmp_path / "a.h5", "1d", 8, step=436),
        scheme_of(tmp_path / "b.h5", "3d", CUBE, **other),
    ]
    _, row = scaling_rows(runs)
    assert (row["scaling"], row["speedup"], row["efficiency"]) == ("other", None, None)
    assert gains_of(runs) == []
    runs[1] = scheme_of(tmp_path / "c.h5", "3d", CUBE)
    assert scaling_rows(runs)[1]["speedup"] == gains_of(runs)[1]["step_over_1d"]
    assert gains_of(runs)[1]["step_over_1d"] == pytest.approx(4.36)


def test_recomputation_does_not_count_as_speedup(tmp_path):
    """Full recomputation increases the operations of the same work by a third."""
    again = {"parallel__recompute": "full", "flops": 4e9 / 3}
    runs = [scheme_of(tmp_path / "1.h5", "1d", 1), scheme_of(tmp_path / "2.h5", "1d", 1, **again)]
    assert [row["speedup"] for row in scaling_rows(runs)] == pytest.approx([1, 1])
    more = scheme_of(tmp_path / "3.h5", "1d", 2, batch=48, **again)
    assert scaling_rows([runs[0], more])[1]["scaling"] == "other"


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7, 20, 99])
def test_interval_of_a_median_ratio_covers_95_percent(count):
    """Tests log-normal times with medians 2 : 1; about 95 % of the intervals contain the ratio."""
    random, times = np.random.default_rng(count), []
    for _ in range(2000):
        one, other = np.exp(random.normal(0, 0.3, (2, count)))
        ratio = 2 * np.median(one) / np.median(other)
        found = interval("r", ratio, relative_error(2 * one), relative_error(other))
        times.append(found["r_low"] <= 2 <= found["r_high"])
    assert 0.93 < np.mean(times) < (0.99 if count >= 6 else 1)


def test_relative_error_requires_three_positive_finite_steps():
    assert relative_error(np.array([1.0, 2])) is None
    mean_error = np.log([1.0, 2, 4]).std(ddof=1) / 3**0.5
    found = interval("r", 2.0, relative_error(np.array([1.0, 4, 2])))
    assert found["r_high"] == pytest.approx(2 * np.exp(T95[1] * mean_error * (np.pi / 2) ** 0.5))
    assert relative_error(np.array([1.0, 2, 3, 4, 5, 6])) == pytest.approx(np.log(6) * 6**0.5 / 10)
    assert relative_error(np.full(6, 3.0)) == relative_error(np.full(3, 3.0)) == 0.0
    assert relative_error(np.array([0.0, 2, 3, 4, 5, 6])) is None
    assert relative_error(np.array([np.nan, 2, 3, 4, 5, 6])) is None


def test_unknown_values_in_scaling_rows_are_none(tmp_path):
    steps = {(0, 0): (0, 100)}
    nothing = {"forward_s": float("nan"), "backward_s": float("nan")}
    trace = by_hand(
        tmp_path / "t.h5", [row(0, 0, 1)], steps, results=nothing, config="who = knows"
    )
    (found,) = scaling_rows([run_row(trace)])
    unknown = ("batch", "family", "forward_s", "average_step_s", "speedup", "efficiency")
    assert [found[key] for key in unknown] == [None] * len(unknown)
    assert found["step_s"] == pytest.approx(0.1)


def _call(axis, op, received, seconds, category="comm"):
    return {"category": category, "axis": axis, "op": op, "bytes": received, "seconds": seconds}


def test_received_bytes_are_compared_by_axis_and_operation():
    product = _call("", "gemm", 0.0, 9.0, "compute")
    one = [product, _call("x", "all_gather", 60.0, 1.0), _call("x", "all_gather", 40.0, 2.0)]
    two = [
        _call("x", "all_gather", 75.0, 1.0),
        _call("x", "all_gather", 0.0, 0.5, "wait"),  # of a call that was made before
        _call("d", "all_reduce", 300.0, 3.0),
        _call("d", "barrier", 0.0, 7.0),
    ]
    keys = "axis", "op", "bytes_1", "seconds_1", "bytes_2", "seconds_2", "difference_2"
    rows = [
        ("all", "all", 100, 3, 375, 11.5, 2.75),
        ("d", "all_reduce", 0, 0, 300, 3, None),
        ("x", "all_gather", 100, 3, 75, 1.5, -0.25),
    ]
    assert received_rows([one, two], True) == [dict(zip(keys, row)) for row in rows]
    assert all(row["seconds_2"] is None for row in received_rows([one, two], False))
    assert received_rows([[product]] * 2, True) == []
