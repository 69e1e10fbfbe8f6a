"""States of the results of operations in index notation."""

import pytest

from hpc3d.predict.proof.states import (
    LOCAL,
    PARTIAL,
    PARTS,
    PRODUCT,
    SUM,
    UNKNOWN,
    StatedOperand,
    joined,
)


def result_of(*operands, to, linear="", sums=True):
    given = [
        StatedOperand(dims, {} if state is None else {"x": state}) for dims, state in operands
    ]
    return [states.get("x") for states in joined(given, to.split(), linear, sums)]


ROWS, COLUMNS = 0, PARTS


def test_sharded_dimensions_remain_sharded():
    assert result_of(("mk", ROWS), ("kn", None), to="mn") == [ROWS]
    assert result_of(("mk", None), ("kn", COLUMNS), to="mn nm") == [COLUMNS, ROWS]
    assert result_of(("mk", None), ("kn", None), to="mn") == [None]


def test_a_contracted_sharded_dimension_gives_a_partial_sum():
    assert result_of(("mk", COLUMNS), ("kn", ROWS), to="mn") == [PARTIAL]


def test_a_maximum_over_a_sharded_dimension_is_a_statistic_of_the_shard():
    assert result_of(("mn", COLUMNS), to="m", sums=False) == [LOCAL]


def test_untracked_dimensions_give_unknown_shards():
    assert result_of(("?", UNKNOWN), ("mn", None), to="mn") == [UNKNOWN]
    assert result_of(("mn", ROWS), to="?") == [UNKNOWN]


def test_an_index_vector_shards_the_selected_rows():
    assert result_of(("vn", None), ("m?v", UNKNOWN), to="mn") == [ROWS]
    assert result_of(("vn", ROWS), ("m?v", UNKNOWN), to="mn") == [PARTIAL]


def test_linear_operations_pass_partial_sums():
    assert result_of(("mn", PARTIAL), ("mn", PARTIAL), to="mn", linear=SUM) == [PARTIAL]
    assert result_of(("mn", PARTIAL), ("n", None), to="mn", linear=PRODUCT) == [PARTIAL]


@pytest.mark.parametrize(
    ("operands", "linear", "message"),
    [
        ([("mn", PARTIAL)], "", "an operand is a partial sum along axis x"),
        ([("mn", LOCAL)], SUM, "an operand is a statistic of one shard along axis x"),
        ([("mn", PARTIAL), ("n", None)], SUM, "adds a partial sum to a replicated value"),
        ([("mn", PARTIAL), ("mn", ROWS)], SUM, "adds a partial sum to a sharded value"),
        ([("mn", PARTIAL), ("mn", ROWS)], PRODUCT, "multiplies a partial sum by a value that"),
        ([("mn", PARTIAL), ("mn", PARTIAL)], PRODUCT, "multiplies a partial sum by a value that"),
        ([("mn", ROWS), ("mn", COLUMNS)], SUM, "axis x shards different dimensions"),
        ([("mn", ROWS), ("mn", ROWS + 1)], "", "axis x shards different dimensions"),
    ],
)
def test_wrong_operands_are_refused(operands, linear, message):
    with pytest.raises(ValueError, match=message):
        result_of(*operands, to="mn", linear=linear)
