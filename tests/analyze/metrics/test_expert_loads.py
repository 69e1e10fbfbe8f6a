"""Loads of experts and the cost of imbalance, compared with known values."""

import h5py
import numpy as np
import pytest

from hpc3d import trace
from hpc3d.analyze.metrics.expert_loads import (
    cost_row,
    exchange_rows,
    expert_rows,
    loads_of,
    router_rows,
)
from hpc3d.analyze.metrics.steady import Steady
from hpc3d.analyze.metrics.wait_states import calls_of
from hpc3d.config.load import to_toml
from hpc3d.trace import schema
from tests.analyze import traces
from tests.analyze.synthetic import by_hand, call, columns, store

# 4 experts on 2 ranks of e, one of them for a token: of 24 sequences of 4 tokens 24 slots each.
MODEL = {"mesh__e": 2, "model__experts": 4, "model__capacity": 1.0, "model__layers": 2}
MODEL |= {"model__moe_every": 2}
EVEN = [12, 12, 12, 12], [12, 12, 12, 12]
UNEVEN = [20, 10, 10, 8], [28, 10, 10, 0]
KEPT = [10, 10, 10, 8], [14, 10, 10, 0]
CHOSEN = {0: (EVEN, EVEN), 1: (UNEVEN, KEPT)}
LOSSES = {0: (0.5, 0.5), 1: (0.5, 0.7)}  # of balance, on both ranks


def exchange(rank, phase, seq, start, end, step=1, group=0, op="all_to_all"):
    return call(rank, op, start, end, seq, group, phase=phase, step=step, bytes=1000, layer=1)


CALLS = [
    *(exchange(rank, "forward", 0, 1, 2, step=0) for rank in range(2)),
    # Dispatch: 3 ms for rank 1.
    exchange(0, "forward", 1, 10, 14),
    exchange(1, "forward", 1, 13, 14),
    *(exchange(rank, "forward", 0, 15, 19, group=1) for rank in range(2)),
    *(exchange(rank, "forward", 2, 20, 21) for rank in range(2)),
    # The gradient of the combine: 5 ms for rank 0.
    exchange(0, "backward", 3, 35, 36),
    exchange(1, "backward", 3, 30, 36),
    *(exchange(rank, "backward", 4, 40, 42) for rank in range(2)),
    *(exchange(rank, "optimizer", 5, 50, 60, op="all_reduce") for rank in range(2)),
]
STEPS = {(rank, step): ((0, 5), (5, 105))[step] for rank in range(2) for step in range(2)}


@pytest.fixture
def opened(tmp_path):
    """Return the open trace of two steps; the first one is balanced."""
    path, both = tmp_path / "trace.h5", [0, 1]
    config = to_toml(traces.config_of(2, **MODEL))
    given = {"config": config, "axes": "c e", "axis_sizes": [1, 2]}
    by_hand(path, CALLS, STEPS, [("e", both), ("c", both)], **given).close()
    experts, routers = [], []
    for step, counts in CHOSEN.items():
        for rank in both:
            place = {"rank": rank, "step": step, "layer": 1}
            pairs = enumerate(zip(*(each[rank] for each in counts)))
            experts += [place | {"expert": n, "chosen": c, "kept": k} for n, (c, k) in pairs]
            routers.append(place | {"balance_loss": LOSSES[step][rank], "z_loss": 0.25})
    with h5py.File(path, "r+") as file:
        store(file.create_group("experts"), schema.EXPERTS, columns(schema.EXPERTS, experts))
        store(file.create_group("routers"), schema.ROUTERS, columns(schema.ROUTERS, routers))
        file["ranks"].create_dataset("coords", data=np.array([[0, 0], [0, 1]], "i4"))
    with trace.open(path) as found:
        yield found


def test_router_rows_by_step_and_layer(opened):
    even, step = router_rows(loads_of(opened))
    same = {"layer": 1, "highest": 1, "lowest": 1, "fullest": 0, "dropped": 0, "empty": 0}
    assert even == pytest.approx({"step": 0, **same, "balance_loss": 0.01, "z_loss": 0.005})
    # Of 48, 20, 20 and 8 choices all but 24 of the first find a slot.
    expected = {"step": 1, "layer": 1, "highest": 2, "lowest": 1 / 3, "fullest": 0}
    expected |= {"dropped": 0.25, "empty": 0.25, "balance_loss": 0.012, "z_loss": 0.005}
    assert step == pytest.approx(expected)


def test_expert_rows_over_selected_steps(opened):
    loads = loads_of(opened)
    first, second, _, last = expert_rows(loads.of(np.array([1])))
    keys = ("layer", "expert", "share", "load", "dropped", "empty")
    for row, values in (
        (first, (1, 0, 0.5, 2, 0.5, 0)),
        (second, (1, 1, 20 / 96, 20 / 24, 0, 1 / 6)),
        (last, (1, 3, 8 / 96, 1 / 3, 0, 2 / 3)),
    ):
        assert row == pytest.approx(dict(zip(keys, values)))
    assert [row["load"] for row in expert_rows(loads)] == pytest.approx(
        [1.5, 11 / 12, 11 / 12, 2 / 3]
    )


def test_exchange_rows_list_only_dispatch_and_combine(opened):
    calls = calls_of(Steady(opened))
    keys = ("axis", "phase", "what", "calls", "bytes", "blocked_s", "wait_s", "transfer_s")
    expected = [
        ("e", "forward", "dispatch", 1, 1000, 2.5e-3, 1.5e-3, 1e-3),
        ("e", "forward", "combine", 1, 1000, 1e-3, 0, 1e-3),
        ("e", "backward", "dispatch", 1, 1000, 2e-3, 0, 2e-3),
        ("e", "backward", "combine", 1, 1000, 3.5e-3, 2.5e-3, 1e-3),
    ]
    found = exchange_rows(calls)
    assert found == [pytest.approx(dict(zip(keys, row))) for row in expected]
    assert exchange_rows(calls, timed=False) == [dict(zip(keys[:5], row)) for row in expected]


def test_cost_row_of_an_expert_imbalance(opened):
    steady = Steady(opened)
    loads = loads_of(opened).of(steady.steps["step"])
    lost = {"slots": 24, "highest": 2, "dropped": 0.25, "dropped_even": 0}
    # Of 24 empty slots the products with 8 x 32 and 32 x 8 weights, forward and twice backward.
    lost |= {"empty": 0.25, "empty_even": 0, "empty_flop": 24 * 6 * 512}
    waits = {"wait_s": 4e-3, "wait_share": 0.04, "rank": 0, "experts": "0 to 1", "load": 22 / 18}
    assert cost_row(steady, loads, calls_of(steady)) == pytest.approx(lost | waits)
    assert cost_row(steady, loads) == pytest.approx(lost | dict.fromkeys(waits))


def test_expert_capacity_is_unknown_without_a_configuration(opened):
    loads = loads_of(opened)._replace(slots=None)
    cost = cost_row(Steady(opened), loads)
    assert cost["dropped"] == 0.125 and cost["empty"] is cost["empty_flop"] is None
    assert "empty" not in router_rows(loads)[0] and expert_rows(loads)[0]["empty"] is None


def test_expert_exchange_bytes_of_a_threaded_run_match_the_formula(tmp_path):
    """The formula is 4 (1 - 1/2) of E C S h' per microbatch and layer."""
    layout = MODEL | {"mesh__d": 2, "parallel__microbatches": 2, "train__dtype": "float32"}
    with traces.opened(traces.trained(tmp_path / "run", 4, **layout)) as found:
        steady = Steady(found)
        loads, rows = loads_of(found), exchange_rows(calls_of(steady))
    assert loads.slots == 24 and loads.layers.tolist() == [1]
    assert (loads.chosen.sum((1, 2)) == 24 * 4).all() and (loads.kept <= 24).all()
    assert [row["calls"] for row in rows] == [2.0] * 4
    sequences, slots, hidden = 24 / 4, 4 * 1, 8
    assert sum(row["bytes"] for row in rows) == 4 * (1 - 1 / 2) * slots * sequences * hidden * 4


def test_dense_run_has_no_expert_loads(tmp_path):
    with traces.opened(traces.trained(tmp_path / "run", 1)) as found:
        assert loads_of(found) is None
