"""Embedding and loss kernels on the host, compared with the NumPy rules."""

import numpy as np
import pytest

from hpc3d.ops.cross_entropy import IGNORE
from hpc3d.ops.embedding import gather_rows, scatter_rows
from hpc3d.ops.rows import add_repeated, sum_repeated
from tests.cuda.conftest import FLOAT
from tests.reference import fused_ops as fused

COLUMNS = [1, 24, 140]
INDEX = np.array([2, -1, 0, 2, 9, 2, 4, 0, -7, 2, 4])  # of a table of 5 rows: some are not there


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("first", [None, 0, 5])
def test_embedding_kernel(columns, first, real, draw, emulate):
    (table, wide), (positions, wide_p) = draw(real, 5, columns), draw(real, 6, columns)
    out = real.empty(INDEX.size, columns)
    given = {"positions": positions, "first": first} if first is not None else {}
    given = {"positions": None, "first": 0, **given, "period": 6, "table_rows": 5}
    size = INDEX.size, columns
    emulate("gather_rows", *size, table=table, index=INDEX, out=out, columns=columns, **given)
    if first is None:
        real.same(out, gather_rows(wide, INDEX), atol=0)
    else:
        real.same(out, fused.embed(wide, INDEX, wide_p, first))


@pytest.mark.parametrize("columns", COLUMNS)
def test_embedding_gradient_kernel(columns, real, draw, emulate):
    dy, wide = draw(real, INDEX.size, columns)
    total, before = draw(FLOAT, 5, columns)
    order = np.argsort(INDEX, kind="stable")
    expected = before + scatter_rows(wide, INDEX, order, (5, columns))
    sizes = {"table_rows": 5, "rows": INDEX.size, "columns": columns}
    given = {"index": INDEX, "order": order, "total": total}
    emulate("scatter_rows", INDEX.size, columns, dy=dy, **given, **sizes)
    FLOAT.same(total, expected, atol=1e-5)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("rows", [1, 7])
def test_position_kernels_and_their_gradient(columns, first, rows, real, draw, emulate):
    (x, wide_x), (table, wide_table) = draw(real, rows, columns), draw(real, 3, columns)
    out = real.empty(rows, columns)
    place = {"first": first, "period": 3, "columns": columns}
    emulate("add_repeated", rows, columns, x=x, table=table, out=out, **place)
    real.same(out, add_repeated(wide_x, wide_table, first, np.empty_like(wide_x)))
    expected = sum_repeated(wide_x, first, 3)
    total = FLOAT.empty(3, columns)
    emulate("sum_repeated", 3, columns, dx=x, total=total, rows=rows, add=False, **place)
    FLOAT.same(total, expected)
    emulate("sum_repeated", 3, columns, dx=x, total=total, rows=rows, add=True, **place)
    FLOAT.same(total, 2 * expected)


VOCABULARIES = [1, 30, 515, 2100]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("padding", [0, 5])
def test_fused_cross_entropy_and_gradient_kernel(vocabulary, padding, real, draw, emulate):
    columns, rows = vocabulary + padding, 4
    logits, wide = draw(real, rows, columns)
    targets = np.array([0, vocabulary - 1, IGNORE, vocabulary // 2])
    losses = FLOAT.empty(rows)
    given = {"targets": targets, "scale": np.float32([0.25]), "loss": losses}
    sizes = {"columns": columns, "vocabulary": vocabulary}
    emulate("cross_entropy", rows, columns, logits=logits, **given, **sizes)
    FLOAT.same(losses, fused.cross_entropy(wide, targets, vocabulary, 0.25), atol=5e-6)
    real.same(logits, wide, atol=1e-6)
    assert not real.back(logits)[:, vocabulary:].any()


@pytest.mark.parametrize("valid", [7, 3, 0, -4])
def test_cross_entropy_kernels_with_a_split_vocabulary(valid, real, draw, emulate):
    """Both halves have 20 columns; in the second one, all but `valid` are padding."""
    rows, half = 5, 10
    logits, wide = draw(real, rows, 2 * half)
    targets = np.array([0, 9, IGNORE, 3, 10 + max(valid, 1) - 1 if valid > 0 else 4])
    present, scale = targets != IGNORE, np.float32([0.5])
    blocks = [real.cast(real.back(logits)[:, at : at + half]) for at in (0, half)]
    tops, index = [FLOAT.empty(rows) for _ in blocks], [targets, targets - half]
    for block, top, last in zip(blocks, tops, [half, valid]):
        emulate("row_max", rows, half, logits=block, top=top, columns=half, valid=last)
    top = np.maximum(*tops)
    parts = [FLOAT.empty(2, rows) for _ in blocks]
    for block, sums, at in zip(blocks, parts, index):
        given = {"index": at, "sums": sums, "columns": half}
        emulate("local_sums", rows, half, logits=block, top=top, **given)
    sums, lost = sum(parts), np.full(1, np.nan)
    emulate("negative_log", 1, rows, sums=sums, valid=present, loss=lost, rows=rows)
    score, right = np.full(2, np.nan), wide[np.arange(rows), targets.clip(0)] == top
    emulate("score_rows", 1, rows, sums=sums, valid=present, score=score, rows=rows)
    assert score.tolist() == [pytest.approx(lost[0]), np.count_nonzero(right & present)]
    for block, at in zip(blocks, index):
        given = {"top": top, "total": sums[0].copy(), "index": at, "valid": present}
        emulate("softmax_grad", rows, half, logits=block, scale=scale, columns=half, **given)
    expected = fused.cross_entropy(wide, targets, half + max(valid, 0), 0.5)
    assert lost[0] == pytest.approx(expected.sum(), rel=1e-5)
    for block, part in zip(blocks, np.hsplit(wide, 2)):
        real.same(block, part, atol=1e-6)


def test_cross_entropy_with_logits_of_minus_infinity(real, draw, emulate):
    """A thread may process -infinity before, or instead of, any other number."""
    logits, wide = draw(real, 2, 40)
    logits[:, :30], wide[:, :30] = real.cast(np.float32([-np.inf])), -np.inf
    targets, losses = np.array([39, 31]), FLOAT.empty(2)
    given = {"targets": targets, "scale": np.float32([0.5]), "loss": losses}
    emulate("cross_entropy", 2, 40, logits=logits, columns=40, vocabulary=40, **given)
    FLOAT.same(losses, fused.cross_entropy(wide, targets, 40, 0.5))
    real.same(logits, wide)


def test_cross_entropy_propagates_nan(draw, emulate):
    """A NaN among the logits must not be lost in a maximum."""
    for column in (0, 1, 64, 99):
        logits, _ = draw(FLOAT, 1, 100)
        logits[0, column] = np.nan
        losses, top = FLOAT.cast(np.zeros(1, np.float32)), FLOAT.cast(np.zeros(1, np.float32))
        emulate("row_max", 1, 100, logits=logits, top=top, columns=100, valid=100)
        given = {"targets": np.array([3]), "scale": np.float32([1]), "loss": losses}
        emulate("cross_entropy", 1, 100, logits=logits, columns=100, vocabulary=100, **given)
        assert np.isnan([top[0], losses[0]]).all()
