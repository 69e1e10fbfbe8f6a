"""The sentences at the beginning of a report, for tables with known values."""

import pytest

from hpc3d.analyze.report.verdict import verdict

PARTS = {"compute_s": 0.2, "wait_s": 0.4, "transfer_s": 0.3, "copy_s": 0.0, "other_s": 0.01}


def rank(**parts):
    found = PARTS | {"unrecorded_s": 0.09} | parts
    return {"step_s": 1.0, "exposed_s": (found["wait_s"] or 0.4) + found["transfer_s"]} | found


def spent(category, axis, op, seconds):
    return {"category": category, "axis": axis, "op": op, "seconds": seconds}


def tables(ranks=None, **given):
    found = {
        "ranks": ranks or [rank(), rank()],
        "time": [
            spent("compute", "", "gemm", 0.15),
            spent("compute", "", "norm", 0.05),
            spent("comm", "z", "reduce_scatter", 0.3),
            spent("comm", "z", "reduce_scatter", 0.1),
            spent("comm", "x", "all_gather", 0.3),
        ],
        "waits": [
            {"axis": "z", "op": "reduce_scatter", "wait_s": 0.3},
            {"axis": "x", "op": "all_gather", "wait_s": 0.1},
        ],
        "stragglers": [{"rank": 3, "imposed_s": 0.2, "straggler": "no"}],
        "imbalance": [{"stage_imbalance": None}],
        "expert_cost": [],
        "prediction": [],
        "copies": [],
    }
    return found | given


def test_verdict_of_a_communication_bound_step():
    assert verdict(tables()) == [
        "20% of a step is computation; "
        "70% communication calls, of which 57% is waiting for other ranks;"
        " 9% unrecorded.",
        "Largest cost: reduce-scatter along z, 40% of a step, of which 75% is waiting.",
    ]


def test_verdict_of_a_single_rank_step():
    alone = rank(compute_s=0.97, wait_s=0.0, transfer_s=0.0, other_s=0.0, unrecorded_s=0.03)
    alone["exposed_s"] = 0.0
    time = [spent("compute", "", "gemm", 0.7), spent("compute", "", "attention", 0.27)]
    assert verdict(tables([alone], time=time, waits=[], stragglers=[])) == [
        "97% of a step is computation.",
        "Largest cost: matrix products, 70% of a step.",
    ]


@pytest.mark.parametrize(("unrecorded", "told"), [(0.049, False), (0.051, True)])
def test_unrecorded_time_is_reported_above_five_percent(unrecorded, told):
    assert ("unrecorded" in verdict(tables([rank(unrecorded_s=unrecorded)]))[0]) == told


def test_stage_message_waits_are_reported_as_the_bubble():
    time = [spent("comm", "p", "recv", 0.4), spent("comm", "p", "send", 0.1)]
    assert "messages between stages (p) and the bubble, 50%" in verdict(tables(time=time))[1]


def test_verdict_of_cpu_time_omits_waiting():
    found = rank(wait_s=None, transfer_s=0.0, exposed_s=0.4)
    first, lever = verdict(tables([found], waits=[], stragglers=[]))
    assert "waiting" not in first + lever and "40% communication calls" in first


def test_verdict_names_a_straggler():
    late = [{"rank": 3, "imposed_s": 0.2, "straggler": "yes"}]
    assert verdict(tables(stragglers=late))[-1] == (
        "Rank 3 is a straggler: the ranks that do the same work wait for it for a total of 200 ms"
        " per step."
    )


@pytest.mark.parametrize(("imbalance", "told"), [(1.049, False), (1.26, True)])
def test_verdict_names_the_slowest_stage(imbalance, told):
    rows = [{"stage_imbalance": imbalance, "stage": 2}]
    sentence = "Stage imbalance: stage 2 computes 1.26 times as long as the mean stage."
    assert (sentence in verdict(tables(imbalance=rows))) == told


@pytest.mark.parametrize(("dropped", "told"), [(0.049, False), (0.12, True)])
def test_verdict_mentions_dropped_tokens_above_five_percent(dropped, told):
    sentence = (
        "12% of the routed tokens exceed the capacity of their experts and are dropped; increase"
        " model.capacity or balance the load."
    )
    assert (sentence in verdict(tables(expert_cost=[{"dropped": dropped}]))) == told


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (1.09, "within 10% of the predicted 1.00 s"),
        (1.11, "1.11 times the predicted 1.00 s"),
        (0.89, "0.89 times the predicted 1.00 s"),
        (25.0, "25 times the predicted 1.00 s"),
    ],
)
def test_verdict_compares_the_measured_step_with_its_prediction(measured, said):
    row = {"machine": None, "quantity": "step_s", "predicted": 1.0, "measured": measured}
    assert verdict(tables(prediction=[row]))[-1].endswith(f", {said}.")
    said = said.replace("the predicted 1.00 s", "the 1.00 s predicted for h100")
    assert verdict(tables(prediction=[row | {"machine": "h100"}]))[-1].endswith(f", {said}.")


def test_offload_copies_are_not_communication():
    """Of 0.3 s, the rank copies 0.2 s itself, and waits 0.1 s for concurrent copies."""
    alone = rank(compute_s=0.6, wait_s=0.1, transfer_s=0.0, copy_s=0.2)
    time = [spent("compute", "", "gemm", 0.25), spent("compute", "", "norm", 0.25)]
    time += [spent("copy", "", "none", 0.2), spent("wait", "", "none", 0.1)]
    given = {"time": time, "waits": [], "copies": [{"name": "fetch"}]}
    assert verdict(tables([alone], **given)) == [
        "60% of a step is computation; 30% offload copies; 9% unrecorded.",
        "Largest cost: offload copies, 30% of a step.",
    ]
