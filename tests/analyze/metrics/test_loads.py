"""Configuration differences that are reported before runs are compared."""

from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from hpc3d.analyze.metrics.loads import (
    EXECUTION,
    LAYOUT,
    WORK,
    difference_of,
    differing,
    group_of,
    notes,
)
from hpc3d.config.input_file import Config
from hpc3d.config.load import flat
from hpc3d.trace.merge import merge
from tests.analyze.report.by_hand import limits, reported, write_run


def test_report_lists_configuration_differences_before_the_comparison(tmp_path, capsys):
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", scheme="1d")
    three, flat = "3d (shards only m and n), x=2 y=2", "1d, x=2 y=2"
    scheme = {"parallel.scheme": f'"3d" in {three}; "1d" in {flat}'}
    found = reported(capsys, one, other)
    assert limits(found) == []
    assert found["differing"] == {WORK: {}, LAYOUT: scheme, EXECUTION: {}}
    merge(one), merge(other)
    with h5py.File(other / "trace.h5", "r+") as file:
        file.attrs["config"] += '[train]\nbatch = 96\ndtype = "float64"\n[data]\npath = "mine"\n'
        file.attrs["cores"] = 3
        file.attrs["kind"] = "simulated"
        file["steps/tokens"][:] = 900
    with h5py.File(one / "trace.h5", "r+") as file:
        file.attrs["cores"] = 4
    found = reported(capsys, one, other, "--out", tmp_path / "out")
    assert limits(found) == [
        f"{flat}: cores: 3 for 4 ranks per host: ranks share cores, so times are longer than with"
        " one core per rank",
    ]
    assert found["differing"] == {
        WORK: {
            "data.path": f'"inputs/corpus" in {three}; "mine" in {flat}',
            "train.batch": f"192 in {three}; 96 in {flat}",
            "train.dtype": f'"float32" in {three}; "float64" in {flat}',
            "tokens a step": f"1,800 in {three}; 900 in {flat}",
        },
        LAYOUT: scheme,
        EXECUTION: {"trace": f"measured in {three}; simulated in {flat}"},
    }
    assert [row["speedup"] for row in found["scaling"]] == [1, None]
    text = (tmp_path / "out" / "report.md").read_text()
    assert (
        f"Limits of this comparison:\n\n* {found['notes'][0]}\n" in text
        and f"* {limits(found)[0]}\n" in text
    )
    assert f"* train.batch: 192 in {three}; 96 in {flat}\n" in text
    with h5py.File(one / "trace.h5", "r+") as file:
        file.attrs["cores"] = 3
    (note,) = limits(reported(capsys, one, other, "--out", tmp_path / "out"))
    assert note.startswith("all runs: cores: 3 for 4 ranks per host")


def test_differing_keys_are_reported_by_group():
    texts = {
        "one": "[mesh]\nx = 2\n",
        "two": 'name = "other"\n[mesh]\nx = 2\nd = 2\n[parallel]\nkeep_dtype = "int8"\nzero = 1\n'
        '[run]\nout = "a"\n',
    }
    traces = [_trace(text) for text in texts.values()]
    groups = {"one": [0], "two": [1]}
    abouts = [{"hosts": "a (4); cpu"}, {"hosts": "b (4); cpu"}]
    assert differing(traces, groups, abouts) == {
        WORK: {"parallel.keep_dtype": 'absent in one; "int8" in two'},
        LAYOUT: {"mesh.d": "1 in one; 2 in two", "parallel.zero": "0 in one; 1 in two"},
        EXECUTION: {
            "run.out": '"results" in one; "a" in two',
            "hosts": "a, cpu in one; b, cpu in two",
        },
    }
    nothing = {WORK: {}, LAYOUT: {}, EXECUTION: {}}
    assert differing(traces[:1], {"one": [0]}, abouts) == nothing
    pair = [traces[0], _trace("")]
    assert differing(pair, groups, [{"hosts": f"a ({n}); cpu"} for n in (4, 8)]) == nothing
    assert [line.split()[:4] for line in notes(pair, groups)] == [
        ["the", "configuration", "of", "two"]
    ]


def test_most_common_value_is_reported_as_all_others():
    traces = [_trace(f"seed = {seed}\n") for seed in (1, 2, 1, 1, 3, 2)]
    groups = {label: [index] for index, label in enumerate("abcdef")}
    (text,) = differing(traces, groups, [{}] * 6)[WORK].values()
    assert text == "2 in b and f; 3 in e; 1 in all others"


def test_runs_of_a_group_are_reported_by_the_name_of_the_group():
    """The runs of a group differ in their seed and in the load of their hosts."""
    texts = [f"seed = {seed}\n[mesh]\nx = {x}\n" for x in (1, 2, 3) for seed in (1, 2)]
    traces, groups = [*map(_trace, texts)], {"a": [0, 1], "b": [2, 3], "c": [4, 5]}
    assert differing(traces, groups, [{}] * 6) == {
        WORK: {"seed": "1, 2 in all groups"},
        LAYOUT: {"mesh.x": "1 in a; 2 in b; 3 in c"},
        EXECUTION: {},
    }


def _trace(text):
    tables = {"steps": {"tokens": np.array([9])}, "ranks": {"host_id": None}}
    return SimpleNamespace(attrs={"config": text}, path=Path("nowhere"), **tables)


def test_every_configuration_key_has_a_group():
    groups = {key: group_of(key) for key in flat(Config())}
    of = {group: [key for key in groups if groups[key] == group] for group in (LAYOUT, EXECUTION)}
    assert {"seed", "model.kind", "data.path", "train.batch", "train.tf32"} <= groups.keys()
    assert {groups[key] for key in ("seed", "model.kind", "data.path", "train.batch")} == {WORK}
    assert groups["parallel.local_steps"] == groups["parallel.outer_momentum"] == WORK
    assert {"mesh.x", "parallel.zero", "parallel.recompute"} <= {*of[LAYOUT]}
    assert {"name", "trace.clock", "run.out", "mesh.transport", "train.backend"} <= {
        *of[EXECUTION]
    }


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (None, "the configuration of one of them is unknown"),
        ({"a": 1}, "only one of them is simulated"),
        ({"a": 2}, "a differs"),
        ({"a": 1, "b": 2}, "b differs"),
        ({"a": 2, "b": 2}, "a and b differ"),
        ({"a": 1} | dict.fromkeys("bcdefg", 0), "b, c, d, e and 2 more keys differ"),
    ],
)
def test_keys_in_which_two_workloads_differ_are_named(other, said):
    assert difference_of({"a": 1}, other) == difference_of(other, {"a": 1}) == said
