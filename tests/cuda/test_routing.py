"""Routing kernels on the host, compared with the NumPy rules."""

import numpy as np
import pytest

from hpc3d.cuda.gpu import Gpu
from hpc3d.ops import routing
from hpc3d.ops.routing import RouterLoss, Routes, SlotForm
from tests.cuda.conftest import FLOAT
from tests.strided import strided

SEQUENCES, COLUMNS = 2, [1, 24, 140]
# Experts of one warp, of two, and more than the threads of a block.
COUNTS = [1, 6, 40, 300]


@pytest.fixture
def by_cuda(emulate):
    """Return the CUDA rule of a primitive, for host arrays."""

    def empty(shape, dtype):
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8).fill(0xFF)
        return array

    gpu = Gpu(emulate, None, None, empty, np.float32)
    return lambda primitive, *given: primitive.cuda_rule(gpu, *given)


def numbers(x):
    """Return logits of experts, with ties of two experts everywhere and of others in some rows."""
    x[:, -1] = x[:, len(x.T) // 2]
    x[::3, 0] = x[::3, len(x.T) // 3]
    return x


def chosen(rows, count, top_k, dtype=np.float32):
    """Return the routes of random logits."""
    logits = np.random.default_rng(5).normal(size=(rows, count)).astype(dtype)
    return routing.route(numbers(logits), top_k)


def same_routes(found, expected):
    assert found.experts.tolist() == expected.experts.tolist()
    for mine, wanted in zip(found[1:], expected[1:], strict=True):
        FLOAT.same(mine, wanted)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("biased", [False, True])
def test_route_kernel(count, top_k, biased, real, draw, by_cuda):
    top_k = min(top_k, count)
    logits, wide = draw(real, 7, count)
    bias, wide_bias = draw(real, count)
    given = bias if biased else None
    expected = routing.route(numbers(wide), top_k, wide_bias if biased else None)
    same_routes(by_cuda(routing.route, numbers(logits), top_k, given), expected)


def test_route_kernel_with_infinite_or_large_logits(real, by_cuda):
    wide = np.float32([[1e4, -np.inf, 0, 1e4, -1e4, -np.inf], [-3e4, 0, 0, 0, 0, 0]])
    logits = real.cast(wide)
    same_routes(by_cuda(routing.route, logits, 4), routing.route(real.back(logits), 4))


def test_route_kernel_weights_of_experts_selected_by_the_bias(real, by_cuda):
    logits, bias = np.float32([[0, 0, -200, -208]]), np.float32([-1, -1, 1, 1])
    same_routes(
        by_cuda(routing.route, real.cast(logits), 2, real.cast(bias)),
        routing.route(logits, 2, bias),
    )


def test_route_kernel_with_non_finite_rows_selects_valid_experts(real, by_cuda):
    """Non-finite values appear in the weights, and no other memory is written."""
    for odd in (np.nan, np.inf):
        logits = np.zeros((2, 5), np.float32)
        logits[1, 2] = odd
        found = by_cuda(routing.route, real.cast(logits), 3)
        assert found.experts[0].tolist() == [0, 1, 2]
        assert len({*found.experts[1].tolist()}) == 3
        assert found.experts.min() >= 0
        assert found.experts.max() < 5
        assert np.isnan(found.weights[1]).any()


@pytest.mark.parametrize(("tokens", "count"), [(4, 3), (150, 6), (20, 64)])
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("capacity", strided([1, 9, 150], 3, 1))
def test_slot_assignment_kernel(tokens, count, top_k, capacity, by_cuda):
    choices = chosen(SEQUENCES * tokens, count, top_k).experts
    room = min(capacity, tokens)
    for parts in {1, count // 2, count}:
        if count % parts == 0:
            form = SlotForm(tokens, count, room, parts, SEQUENCES * room + 1)
            expected = routing.slots_of(choices, form)
            assert by_cuda(routing.slots_of, choices, form).tolist() == expected.tolist()


@pytest.mark.parametrize("rows", [12, 300, 0])
def test_expert_count_kernels(rows, by_cuda):
    top_k, count, tokens = 3, 5, max(rows // 3, 4)
    choices = chosen(rows, count, top_k).experts
    expected = routing.counts_of(choices, tokens, count)
    counts = by_cuda(routing.counts_of, choices, tokens, count)
    assert (counts.tolist(), counts.dtype) == (expected.tolist(), np.int64)
    slots = np.where(choices % 2, -1, choices)
    for mine, wanted in zip(
        by_cuda(routing.load_of, choices, slots, count),
        routing.load_of(choices, slots, count),
        strict=True,
    ):
        assert mine.tolist() == wanted.tolist()
    grad, wanted = np.ones((2, count), np.float32)
    by_cuda(routing.add_excess, grad, choices)
    routing.add_excess(wanted, choices)
    assert grad.tolist() == wanted.tolist()


@pytest.mark.parametrize("sequences", [0, 1, 40])
def test_expert_share_kernel(sequences, by_cuda):
    counts = np.random.default_rng(3).integers(0, 99, (3, sequences, 4, 9))
    shares = by_cuda(routing.shares_of, counts, 50, np.float32)
    FLOAT.same(shares, routing.shares_of(counts, 50, np.float32))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("tokens", [0, 11])
@pytest.mark.parametrize("offset", strided([0, 1], 2, 1))
def test_dispatch_and_combine_kernels(columns, top_k, tokens, offset, real, draw, by_cuda):
    form = SlotForm(max(tokens, 3), 4, 3, 2, SEQUENCES * 3 + 1)
    routes = chosen(SEQUENCES * tokens, 4, top_k)
    slots, weights = routing.slots_of(routes.experts, form), routes.weights
    rows, held = len(slots), 4 * form.rows
    x, wide_x = draw(real, rows, columns)
    y, wide_y = draw(real, held, columns, offset=offset)
    out, back = real.empty(held, columns, offset=offset), real.empty(rows, columns)
    assert by_cuda(routing.dispatch, x, slots, out) is out
    real.same(out, routing.dispatch(wide_x, slots, np.empty_like(wide_y)), atol=0)
    assert by_cuda(routing.dispatch_grad, y, slots, back) is back
    real.same(back, routing.dispatch_grad(wide_y, slots, np.empty_like(wide_x)))
    assert by_cuda(routing.combine, y, slots, weights, back) is back
    real.same(back, routing.combine(wide_y, slots, weights, np.empty_like(wide_x)))
    found, dweights = by_cuda(routing.combine_grad, x, y, slots, weights, out)
    given = wide_x, wide_y, slots, weights, np.empty_like(wide_y)
    expected, wanted = routing.combine_grad(*given)
    real.same(found, expected)
    FLOAT.same(dweights, wanted, atol=2e-5)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize(("first", "rows"), [(0, 6), (4, 7), (0, 0)])
def test_router_loss_and_gradient_kernels(count, top_k, first, rows, real, draw, by_cuda):
    routes = chosen(rows, count, min(top_k, count))
    shares, dweights = draw(FLOAT, 2, count)[0], draw(FLOAT, *routes.weights.shape)[0]
    loss = RouterLoss(shares, first, 6, 0.3, 0.2)
    found = by_cuda(routing.router_loss, routes.probs, routes.lse, loss)
    expected = routing.router_loss(routes.probs, routes.lse, loss)
    assert [(each.shape, each.dtype) for each in found] == [((1,), np.float64)] * 2
    np.testing.assert_allclose(np.ravel(found), expected, rtol=1e-5, atol=1e-6)
    given, out = (dweights, Routes(*routes), loss), real.empty(rows, count)
    assert by_cuda(routing.route_grad, *given, np.float32([0.7]), out) is out
    expected = routing.route_grad(*given, 0.7, np.empty_like(routes.probs))
    real.same(out, expected, atol=1e-6)
