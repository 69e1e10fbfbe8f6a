"""Published training steps on H100 GPUs: their layouts, predictions and errors."""

import pytest

from hpc3d.predict.machine.machine import AttentionPass, Errors
from hpc3d.predict.machine.machine_file import load
from hpc3d.studies.hopper_steps import (
    by_kind,
    by_layout,
    config_of,
    held_out,
    machine_of,
    predicted,
    published,
)

ROWS = {row["id"]: row for row in published()}
SMALL = "llm-foundry-mpt-1b-s2048-8"


def test_rows_have_a_source_a_layout_and_a_time():
    assert len(ROWS) == 66
    for row in ROWS.values():
        assert row["source"] and row["derived"] and row["seconds"] > 0
        assert {"mesh.d", "model.layers", "train.batch"} <= row["layout"].keys()


def test_rows_are_held_out_by_name_not_by_error():
    held = [name for name in ROWS if held_out(name)]
    assert 0.4 < len(held) / len(ROWS) < 0.65
    assert held_out(SMALL) is False


def test_predicted_row_has_the_error_of_its_step_time():
    found = predicted(ROWS[SMALL], load("h100"))
    assert found["ranks"] == 8
    assert found["error"] == found["predicted_s"] / ROWS[SMALL]["seconds"] - 1
    assert found["fits"] is True


def test_machine_of_a_row_has_its_memory_and_network():
    known = load("h100")
    slower = machine_of({"machine": {"memory": 0.5, "network": 0.25}}, known)
    assert slower.memory_bandwidth == known.memory_bandwidth / 2
    assert slower.links[0] == known.links[0]
    assert slower.links[1].bandwidth == known.links[1].bandwidth / 4
    assert slower.links[1].node_bandwidth == known.links[1].node_bandwidth / 4
    assert machine_of({}, known) == known
    flash = machine_of({"machine": {"flash_2": True}}, known)
    case = AttentionPass(128, 8192, causal=True, backward=False)
    assert flash.fused_attention(333e12, 0, "bfloat16", case) == pytest.approx(1.0)


def test_row_of_an_unsupported_layout_is_reported_not_predicted():
    layout = ROWS[SMALL]["layout"] | {"parallel.shard": 7}
    found = predicted(ROWS[SMALL] | {"layout": layout}, load("h100"))
    assert "error" not in found and "7" in found["refused"]


@pytest.mark.slow
def test_layouts_of_the_rows_are_valid():
    for row in ROWS.values():
        config_of(row)


def test_errors_are_summarized_by_kind_and_by_use():
    rows = [
        {"kind": "a", "held_out": False, "error": 0.1},
        {"kind": "a", "held_out": True, "error": -0.3},
        {"kind": "b", "held_out": True, "refused": "no"},
        {"kind": "nanotron", "held_out": True, "error": 0.5},
    ]
    found = by_kind(rows)
    assert [*found][:2] == ["a", "nanotron"]
    assert found["held out"]["worst"] == 0.5
    assert found["a"]["mean"] == found["a"]["median"] == pytest.approx(0.2)
    assert found["a"]["signed"] == pytest.approx(-0.1)
    assert (found["all"]["rows"], found["all but nanotron"]["rows"]) == (3, 2)
    assert found["all but nanotron"]["worst"] == -0.3


def test_intervals_are_percentiles_of_the_published_over_the_predicted_time():
    rows = [{"kind": "a", "layout": "sharded", "error": 1 / (1 + n / 10) - 1} for n in range(11)]
    rows += [{"kind": "nanotron", "layout": "sharded", "error": 9.0}]
    rows += [{"kind": "a", "layout": "experts", "error": error} for error in (1.0, 0.25, 0.0, 0.6)]
    rows += [{"kind": "a", "refused": "no"}]
    assert by_layout(rows) == [Errors("experts", 4, 0.5, 1.0), Errors("sharded", 11, 1.1, 1.9)]


def test_llm_foundry_computes_attention_in_triton():
    """The forward pass is 1.4 times as long as with FlashAttention-2, and the backward twice."""
    known, row = load("h100"), {"machine": {"flash_2": True}}
    machines = [machine_of(each, known) for each in (row, row | {"kind": ROWS[SMALL]["kind"]})]
    for backward, slower in ((False, 1.4), (True, 2.0)):
        case = AttentionPass(128, 4096, causal=True, backward=backward)
        fast, slow = (each.fused_attention(1e15, 0, "bfloat16", case) for each in machines)
        assert slow == pytest.approx(slower * fast)
