"""Invariants of traces: satisfied by real runs, and violated by modified traces."""

import re
import shutil

import h5py
import numpy as np
import pytest

import hpc3d.trace
from hpc3d.analyze.metrics.step import peak_rows
from hpc3d.trace import schema
from hpc3d.trace.checks_per_rank import violations
from hpc3d.trace.merge import merge
from tests.analyze.traces import trained
from tests.elided import elided
from tests.runs import train
from tests.strided import strided
from tests.trace.large import ON_A_HOST, SLOT, generate

PIPELINE = {"mesh__p": 2, "mesh__d": 2, "mesh__x": 2, "parallel__microbatches": 3}
CUBE = {"mesh__x": 2, "mesh__y": 2, "mesh__z": 2, "model__hidden": 16, "model__heads": 4}
LAYOUTS = {
    "1f1b": {**PIPELINE, "parallel__schedule": "1f1b"},
    "zb-h1": {**PIPELINE, "parallel__schedule": "zb-h1"},
    "pipedream": {
        "mesh__p": 4,
        "mesh__x": 2,
        "parallel__schedule": "pipedream",
        "parallel__microbatches": 4,
        "model__tied": "false",
        "train__clip": 0.0,
    },
    "ZeRO 3": {"mesh__d": 4, "mesh__x": 2, "parallel__zero": 3},
    "2.5d": {**CUBE, "parallel__scheme": "2.5d"},
    "3d-broadcast": {**CUBE, "parallel__scheme": "3d-broadcast"},
    "2d-summa": {**CUBE, "mesh__z": 1, "mesh__d": 2, "parallel__scheme": "2d-summa"},
}


# Real runs


@pytest.mark.parametrize("layout", strided(LAYOUTS, 6, 2))
def test_threaded_run_has_no_violation(layout, tmp_path):
    assert_sound(trained(tmp_path / "run", 8, **LAYOUTS[layout]))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "mpi"], ids="by {}".format)  # mpi is a mark
@pytest.mark.parametrize("layout", ["1f1b", "zb-h1"])
def test_mpi_run_has_no_violation(layout, transport, tmp_path):
    how = {"train__steps": 3, "train__batch": 24, "model__layers": 4, "mesh__transport": transport}
    assert_sound(train(8, tmp_path, **how, **LAYOUTS[layout]))


def assert_sound(run):
    with hpc3d.trace.open(run / "trace.h5") as trace:
        assert trace.attrs["complete"]
        assert violations(trace) == []
        ranks, calls = np.unique(
            trace.events["rank", :][trace.events["seq"] >= 0], return_counts=True
        )
        assert ranks.tolist() == [*range(8)] and calls.min() > 20


# A trace that was tampered with


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Trace of 16 ranks on 2 hosts, with 3 steps, 40 events per step, and every kind of call."""
    folder = tmp_path_factory.mktemp("sound")
    generate(folder, (2, 2, 4, 1), 3, 40)
    return merge(folder)


@pytest.fixture
def copy(sound, tmp_path):
    return shutil.copy(sound, tmp_path / "trace.h5")


def found(path):
    with hpc3d.trace.open(path) as trace:
        return violations(trace)


def test_untampered_trace_is_valid(copy):
    assert found(copy) == []


def call(op, rank=3, number=2):
    """Return the row of the `number`-th call of this kind of a rank."""

    def row(file):
        codes = file["events/op"][:] == schema.OP.index(op)
        return np.flatnonzero(codes & (file["events/rank"][:] == rank))[number]

    return row


def change(column, row, value):
    """Set a value, or add to it if given as (amount,)."""

    def edit(file):
        place = row(file) if callable(row) else row
        values = file[column]
        values[place] = values[place] + value[0] if isinstance(value, tuple) else value

    return edit


def swap(file):
    first, second = file["events/t_start"][8:10]
    file["events/t_start"][8:10] = second, first


def move_pointer(file):
    file["index/rank_ptr"][3] += 1


def long_events(file):
    """Extend all events of step 0 on rank 2 to its end."""
    mine = (file["events/rank"][:] == 2) & (file["events/step"][:] == 0)
    duration = file["events/dur"][:]
    duration[mine] = 40 * SLOT - file["events/t_start"][:][mine]
    file["events/dur"][:] = duration


COPY = schema.CATEGORY.index("copy")
TAMPERED = {
    "overlap": (
        change("events/dur", 5, (SLOT,)),
        "/events: ... begins before ...: 1 row, ... 6 (rank 0, step 0)",
    ),
    "order": (swap, "/events: ... t_start: 1 row, ... 9"),
    "index": (move_pointer, "/events: ... /index/rank_ptr: 1 row"),
    "count": (change("ranks/n_events", 2, 7), "/ranks: n_events ...: 1 row, ... 2"),
    "parent": (change("events/parent", 5, 4), "/events: ... parent: 1 row"),
    "later parent": (change("events/parent", 5, 6), "/events: ... parent: 1 row"),
    "itself": (change("events/parent", 5, 5), "/events: ... parent: 1 row"),
    "posted": (
        change("events/posted", 5, (10,)),
        "/events: ... posted: 1 row",
    ),
    "after": (change("steps/t_end", 0, (-SLOT,)), "/events: ... inside ... step: 1 row"),
    "before": (change("steps/t_start", 1, (SLOT,)), "/events: ... inside ... step: 1 row"),
    "sum": (long_events, "/steps: ... events: 1 row, ... 6 (rank 2"),
    "backwards": (change("steps/t_end", 4, 0), "/steps: ... ends ... begins: 1 row"),
    "two steps": (
        change("steps/t_end", 3, (SLOT,)),
        "/steps: ... begins before ...: 1 row, ... 4 (rank 1, step 1)",
    ),
    "own step": (change("steps/step", 5, 9), "/steps: ... ranks ... step: 16 rows"),
    "evaluated twice": (
        change("evaluation/step", 1, 0),
        "/evaluation: ... previous row: 1 row, ... 1",
    ),
    "evaluated before": (change("evaluation/step", 0, -1), "/evaluation: step is less than 0: 1"),
    "text without an evaluation": (
        change("validation/step", 1, 9),
        "/validation: ... is missing: 1 row, ... 1",
    ),
    "evaluation in a step": (
        change("events/phase", 5, schema.PHASE.index("evaluation")),
        "/events: ... evaluation ... step: 1 row",
    ),
    "load": (
        change("experts/kept", 3, 9),
        "/experts: ... (kept > chosen): 1 row, ... 3 (rank 0, step 1)",
    ),
    "peak": (change("memory/peak", 8, 1), "/memory: ... peak ... bytes ...: 1 row"),
    **{
        name: (
            change(f"memory/{column}", 6, value),
            "/memory: ... all ... kinds: 1 row, ... 6 (rank 0, step 0)",
        )
        for name, column, value in (
            ("all above the sum", "peak", (6 << 21) + 1),
            ("all live", "bytes", (6 << 20) - 1),
        )
    },
    "all below a kind": (
        change("memory/peak", 0, (6 << 21) + 1),
        "/memory: ... all ... kinds: 1 row, ... 6 (rank 0, step 0)",
    ),
    "op": (
        change("events/op", call("all_gather"), schema.OP.index("reduce_scatter")),
        "/events: ... op ...: 1 row",
    ),
    "step": (
        change("events/step", call("all_gather"), 2),
        "/events: ... step ...: 1 row",
    ),
    "dtype": (
        change("events/dtype", call("all_gather"), schema.DTYPE.index("int32")),
        "/events: ... dtype ...: 1 row",
    ),
    "elements": (
        change("events/count", call("all_reduce"), (1,)),
        "/events: ... count ...: 1 row",
    ),
    "bytes": (
        change("events/bytes", call("reduce_scatter"), (4,)),
        "/events: ... bytes ... count: 1 row",
    ),
    "stranger": (
        change("events/group", call("all_gather", 3), 0),
        "/events: ... group ...: 1 row",
    ),
    "twice": (
        change("events/seq", call("all_gather"), 1),
        "/events: ... twice: 1 row",
    ),
    "absent": (
        change("events/category", call("all_gather"), COPY),
        "/events: ... members ... call: 3 rows",
    ),
    "early": (
        change("events/t_global", call("all_reduce"), (-SLOT,)),
        "/events: ... ends before all ...: 1 row",
    ),
    "one end": (
        change("events/category", call("recv"), COPY),
        "/events: ... without ...: 1 row",
    ),
    "other peer": (
        change("events/peer", call("send"), 4),
        "/events: ... without ...: 2 rows",
    ),
    "short": (
        change("events/bytes", call("recv"), (-4,)),
        "/events: ... bytes ... send: 1 row",
    ),
    "prophecy": (
        change("events/t_global", call("recv"), (-2 * SLOT,)),
        "/events: ... ends ... posted: 1 row",
    ),
    "negative": (
        change("events/dur", 3, -1),
        "/events: dur ... 0: 1 row, ... 3",
    ),
    "unknown": (change("events/op", 3, 77), "events/op ... 77"),
    "coordinate": (change("ranks/coords", (3, 1), -2), "/ranks: coords ... -1: 1 row"),
    "root": (change("events/group", 3, 10**6), "events/group ... 1000000;"),
}


@pytest.mark.parametrize("what", strided(TAMPERED, 3))
def test_tampered_trace_is_named(what, copy):
    edit, line = TAMPERED[what]
    with h5py.File(copy, "r+") as file:
        edit(file)
    assert any(re.search(elided(line), each) for each in found(copy)), found(copy)


def test_nested_event_does_not_overlap_its_parent(copy):
    """The first event of a step encloses all its other events."""
    with h5py.File(copy, "r+") as file:
        start, duration = file["events/t_start"], file["events/dur"]
        duration[0] = start[39] + duration[39] - start[0]
        file["events/parent"][1:40] = 0
    assert found(copy) == []


def test_single_kind_may_have_the_total_peak(copy):
    with h5py.File(copy, "r+") as file:
        change("memory/peak", 0, 6 << 21)(file)
    assert found(copy) == []


def test_trace_of_a_version_without_total_memory_is_valid(copy):
    """The enumeration of such a trace has fewer members."""
    with h5py.File(copy, "r+") as file:
        kept = file["memory/kind"][:] < 6
        columns = {name: file["memory"][name][:][kept] for name in file["memory"]}
        known = {name: code for code, name in enumerate(schema.MEMORY_KIND[:6])}
        for name, values in columns.items():
            attrs = dict(file["memory"][name].attrs)
            del file["memory"][name]
            dtype = h5py.enum_dtype(known, "u1") if name == "kind" else None
            file["memory"].create_dataset(name, data=values, dtype=dtype).attrs.update(attrs)
    assert found(copy) == []
    with hpc3d.trace.open(copy) as trace:
        assert [row["kind"] for row in peak_rows(trace)] == [*known]


def test_incomplete_trace_is_not_checked_for_missing_data(copy):
    with h5py.File(copy, "r+") as file:
        file.attrs["complete"] = False
        for op in ("all_gather", "recv"):
            change("events/category", call(op), COPY)(file)
        file["steps/step"][5] = 9
    assert found(copy) == []


def test_hosts_are_compared_by_their_corrected_clocks(copy):
    """The second host's clock is an hour ahead, and this offset is known."""
    with h5py.File(copy, "r+") as file:
        ahead = 3600 * 10**9 * (file["events/rank"][:] >= ON_A_HOST)
        for column in ("t_start", "posted"):
            file[f"events/{column}"][:] += ahead
        for column in ("t_start", "t_end"):
            file[f"steps/{column}"][:] += 3600 * 10**9 * (file["steps/rank"][:] >= ON_A_HOST)
    assert found(copy) == []


@pytest.mark.parametrize("why", ["no samples", "CPU time"])
def test_uncompared_clocks_are_not_checked(why, copy):
    """The ranks of the second host seem to be a day late."""
    with h5py.File(copy, "r+") as file:
        file["events/t_global"][:] += 86400 * 10**9 * (file["events/rank"][:] >= ON_A_HOST)
    assert len(found(copy)) == 2
    with h5py.File(copy, "r+") as file:
        if why == "no samples":
            for column in file["clock/samples"].values():
                column.resize((0,))
        else:
            file.attrs["config"] = '[trace]\nclock = "cpu"\n'
    assert found(copy) == []
