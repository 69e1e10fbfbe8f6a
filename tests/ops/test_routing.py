"""Routing compared with loops over tokens, and its gradients with torch, in float64."""

from math import inf

import numpy as np
import pytest
import torch

from hpc3d.arrays.abstract import AbstractPool, CostMeter
from hpc3d.ops import routing
from hpc3d.ops.routing import RouterLoss, Routes, SlotForm

RNG = np.random.default_rng(7)
SEQUENCES, TOKENS, COUNT, WIDTH = 3, 10, 6, 5
ROWS = SEQUENCES * TOKENS
CHOICES = [1, 2, 3]
# With room for some, on one rank and on two, with rows that are nobody's; and with room for all.
FORMS = [
    SlotForm(TOKENS, COUNT, 2, 1, 6),
    SlotForm(TOKENS, COUNT, 3, 2, 12),
    SlotForm(TOKENS, COUNT, 10, 3, 30),
]


def logits_of(rows=ROWS, dtype=np.float64):
    """Return logits with ties: two experts are equal for all tokens, others for single tokens."""
    logits = RNG.normal(size=(rows, COUNT)).astype(dtype)
    logits[:, 4] = logits[:, 1]
    logits[: rows // 3, 2] = logits[: rows // 3, 0]
    logits[rows // 2 : rows // 2 + 1] = 0.5
    return logits


def chosen(scores, top_k):
    """Return the experts of one token by their scores; on ties, the lower index is first."""
    left, found = dict(enumerate(scores)), []
    for _ in range(top_k):
        best = min(expert for expert in left if left[expert] == max(left.values()))
        found.append(best)
        del left[best]
    return found


def placed(choices, form):
    """Return the slots of choices, token by token."""
    tokens, count, capacity, parts, held = form
    slots = np.full(choices.shape, -1)
    for sequence in range(len(choices) // tokens):
        filled = dict.fromkeys(range(count), 0)
        for choice in range(choices.shape[1]):
            for row in range(sequence * tokens, (sequence + 1) * tokens):
                expert = int(choices[row, choice])
                place = filled[expert]
                filled[expert] += 1
                if place < capacity:
                    each = count // parts
                    at = expert // each * held + sequence * capacity + place
                    slots[row, choice] = at * each + expert % each
    return slots


def drawn(top_k, form=FORMS[0], rows=ROWS, dtype=np.float64):
    """Return routes, slots, and the number of rows with a slot."""
    routes = routing.route(logits_of(rows, dtype), top_k)
    slots = routing.slots_of(routes.experts, form)
    return routes, slots, form.parts * form.rows * (form.count // form.parts)


def loss_of(routes, first=0):
    counts = routing.counts_of(routes.experts, TOKENS, COUNT).reshape(1, -1, 1, COUNT)
    choices = TOKENS * routes.experts.shape[1]
    shares = routing.shares_of(counts, choices, routes.probs.dtype)
    return RouterLoss(shares, first, TOKENS, 0.3, 0.2)


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("top_k", CHOICES)
@pytest.mark.parametrize("biased", [False, True])
def test_top_k_experts_and_weights_of_each_token(top_k, biased):
    """The weights are probabilities, whatever the scores of the selection are."""
    logits = logits_of()
    bias = RNG.normal(size=COUNT) if biased else None
    routes = routing.route(logits, top_k, bias)
    probs = torch.tensor(logits).softmax(1).numpy()
    scores = probs + bias if biased else logits
    experts = [chosen(row, top_k) for row in scores]
    assert routes.experts.tolist() == experts
    close(routes.probs, probs)
    close(routes.lse, torch.tensor(logits).logsumexp(1))
    for row, mine in enumerate(experts):
        gates = probs[row, mine]
        close(routes.weights[row], gates if top_k == 1 else gates / gates.sum())


def test_router_bias_changes_the_selected_experts():
    logits = logits_of()
    assert (routing.route(logits, 1, np.arange(COUNT) == 3).experts == 3).all()


def test_routing_of_large_and_infinite_logits():
    logits = np.array([[1e4, -inf, 0.0, 1e4, -1e4, -inf]])
    routes = routing.route(logits, 3)
    assert routes.experts.tolist() == [[0, 3, 1]]
    assert routes.weights.tolist() == [[0.5, 0.5, 0]]
    close(routes.lse, [1e4 + np.log(2)])


@pytest.mark.parametrize("top_k", CHOICES)
@pytest.mark.parametrize("form", FORMS)
def test_slots_are_assigned_in_token_order(top_k, form):
    choices = routing.route(logits_of(), top_k).experts
    slots = routing.slots_of(choices, form)
    assert slots.tolist() == placed(choices, form).tolist()
    kept = slots[slots >= 0]
    assert len(set(kept)) == len(kept)
    assert (len(kept) == slots.size) == (form.capacity == TOKENS)


def test_second_choices_are_placed_after_all_first_choices():
    """One of two slots goes to the last token's first choice, none to the first token's second."""
    choices = np.array([[1, 0], [0, 1], [0, 1]])
    slots = routing.slots_of(choices, SlotForm(3, 2, 2, 1, 2))
    assert slots.tolist() == [[1, -1], [0, 3], [2, -1]]


def test_dropped_tokens_do_not_depend_on_other_groups():
    choices = routing.route(logits_of(), 2).experts
    form, alone = FORMS[0], FORMS[0]._replace(rows=2)
    together = routing.slots_of(choices, form)
    for sequence in range(SEQUENCES):
        rows = slice(sequence * TOKENS, (sequence + 1) * TOKENS)
        mine = routing.slots_of(choices[rows], alone)
        moved = mine + sequence * form.capacity * COUNT
        assert together[rows].tolist() == np.where(mine < 0, -1, moved).tolist()


def test_choices_are_counted_by_routing_group():
    choices = np.array([[1, 0], [1, 2], [2, 1], [0, 1]])
    assert routing.counts_of(choices, 2, 3).tolist() == [[1, 2, 1], [1, 2, 1]]
    assert routing.counts_of(choices, 4, 3).tolist() == [[2, 4, 2]]


@pytest.mark.parametrize("top_k", CHOICES)
def test_shares_of_split_sequences_equal_those_of_full_ones(top_k):
    """Three ranks have four tokens of each of two sequences, in two routing groups."""
    whole = routing.route(logits_of(24), top_k).experts.reshape(2, 3, 4, top_k)
    groups = [routing.counts_of(whole[:, rank].reshape(8, top_k), 2, COUNT) for rank in range(3)]
    counts = np.stack(groups).reshape(3, 2, 2, COUNT)
    full = routing.counts_of(whole.reshape(24, top_k), 12, COUNT)
    close(routing.shares_of(counts, 12 * top_k, np.float64), full / (12 * top_k))


@pytest.mark.parametrize("top_k", CHOICES)
def test_shares_loads_and_excess_are_counted(top_k):
    routes, slots, _ = drawn(top_k)
    choices = routes.experts.reshape(SEQUENCES, -1)
    expected = [[list(row).count(e) / (TOKENS * top_k) for e in range(COUNT)] for row in choices]
    close(loss_of(routes).shares, expected)
    found, kept = routing.load_of(routes.experts, slots, COUNT)
    assert found.tolist() == [int((choices == expert).sum()) for expert in range(COUNT)]
    assert kept.tolist() == [int((slots[routes.experts == e] >= 0).sum()) for e in range(COUNT)]
    assert kept.sum() < found.sum() == slots.size
    grad = np.ones(COUNT)
    routing.add_excess(grad, routes.experts)
    assert grad.tolist() == (1 + COUNT * found - slots.size).tolist()


@pytest.mark.parametrize("top_k", CHOICES)
@pytest.mark.parametrize("form", FORMS)
def test_dispatch_and_combine_move_rows_to_slots_and_back(top_k, form, blocks):
    routes, slots, held = drawn(top_k, form)
    x, y = RNG.normal(size=(ROWS, WIDTH)), RNG.normal(size=(held, WIDTH))
    buffer, back, total = np.zeros((held, WIDTH)), np.zeros_like(x), np.zeros_like(x)
    for row, mine in enumerate(slots):
        for choice, slot in enumerate(mine):
            if slot >= 0:
                buffer[slot] = x[row]
                back[row] += y[slot]
                total[row] += routes.weights[row, choice] * y[slot]
    close(routing.dispatch(x, slots, np.full_like(buffer, np.nan)), buffer)
    close(routing.dispatch_grad(y, slots, np.full_like(x, np.nan)), back)
    close(routing.combine(y, slots, routes.weights, np.full_like(x, np.nan)), total)


@pytest.mark.parametrize("top_k", CHOICES)
@pytest.mark.parametrize("form", FORMS)
def test_combine_gradients_match_torch(top_k, form, blocks):
    routes, slots, held = drawn(top_k, form)
    y = torch.tensor(RNG.normal(size=(held, WIDTH)), requires_grad=True)
    weights = torch.tensor(routes.weights, requires_grad=True)
    dout = RNG.normal(size=(ROWS, WIDTH))
    rows = [
        sum((weights[at] * y[slots[at]] for at in kept_of(slots, row)), torch.zeros(WIDTH))
        for row in range(ROWS)
    ]
    torch.stack(rows).backward(torch.tensor(dout))
    out = np.full((held, WIDTH), np.nan)
    found, dweights = routing.combine_grad(dout, y.detach().numpy(), slots, routes.weights, out)
    assert found is out
    close(out, y.grad)
    close(dweights, weights.grad)
    assert not dweights[slots < 0].any()


def kept_of(slots, row):
    return [(row, choice) for choice, slot in enumerate(slots[row]) if slot >= 0]


def test_dropped_token_is_zero_and_has_no_gradient():
    slots, weights = np.array([[-1, -1], [2, -1]]), np.full((2, 2), 0.5)
    x, y = RNG.normal(size=(2, WIDTH)), RNG.normal(size=(4, WIDTH))
    assert not routing.combine(y, slots, weights, np.ones_like(x))[0].any()
    assert not routing.dispatch_grad(y, slots, np.ones_like(x))[0].any()
    out, dweights = routing.combine_grad(x, y, slots, weights, np.ones_like(y))
    assert np.flatnonzero(out.any(1)).tolist() == [2]
    assert np.argwhere(dweights).tolist() == [[1, 0]]


@pytest.mark.parametrize("top_k", CHOICES)
@pytest.mark.parametrize("first", [0, 4, 20])
def test_router_losses_and_logit_gradients_match_torch(top_k, first):
    """Tests rows from `first` on; the shares are those of all rows, and have no gradient."""
    every, scale = logits_of(), 0.7
    bias = RNG.normal(size=COUNT) * 0.1
    loss = loss_of(routing.route(every, top_k, bias), first)
    logits = torch.tensor(every[first : first + 10], requires_grad=True)
    routes = routing.route(logits.detach().numpy(), top_k, bias)
    dweights = RNG.normal(size=routes.weights.shape)
    probs = logits.softmax(1)
    weights = probs.gather(1, torch.tensor(routes.experts))
    if top_k > 1:
        weights = weights / weights.sum(1, keepdim=True)
    balance = sum(
        0.3 * (torch.tensor(loss.shares[(first + row) // TOKENS]) * mine).sum()
        for row, mine in enumerate(probs)
    )
    z = 0.2 * logits.logsumexp(1).square().sum()
    found = routing.router_loss(routes.probs, routes.lse, loss)
    close(found, [balance.item(), z.item()])
    ((weights * torch.tensor(dweights)).sum() + scale * (balance + z)).backward()
    out = np.full_like(routes.probs, np.nan)
    close(routing.route_grad(dweights, routes, loss, scale, out), logits.grad)


def passed(routes, slots, loss, held, empty):
    """Return the results of each function."""
    x, y = empty((len(slots), WIDTH)), empty((held, WIDTH))
    dweights = empty(slots.shape)
    return [
        *routes,
        slots,
        loss.shares,
        *routing.load_of(routes.experts, slots, COUNT),
        routing.dispatch(x, slots, empty(y.shape)),
        routing.dispatch_grad(y, slots, empty(x.shape)),
        routing.combine(y, slots, routes.weights, empty(x.shape)),
        *routing.combine_grad(x, y, slots, routes.weights, empty(y.shape)),
        routing.route_grad(dweights, routes, loss, 0.7, empty(routes.probs.shape)),
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [ROWS, 0])
def test_abstract_routing_has_the_same_shapes_and_types(dtype, rows):
    routes, slots, held = drawn(2, FORMS[1], rows, dtype)
    found = passed(routes, slots, loss_of(routes), held, lambda shape: np.ones(shape, dtype))
    pool = AbstractPool(CostMeter())
    shapes = routing.route(pool.empty((rows, COUNT), dtype), 2)
    slots = routing.slots_of(shapes.experts, FORMS[1])
    loss = loss_of(shapes)
    expected = passed(shapes, slots, loss, held, lambda shape: pool.empty(shape, dtype))
    assert isinstance(shapes, Routes)
    for mine, shape in zip(found, expected, strict=True):
        assert (mine.shape, mine.dtype) == (shape.shape, shape.dtype)
    assert routing.router_loss(shapes.probs, shapes.lse, loss) == (0, 0)
    assert routing.add_excess(pool.empty((COUNT,), dtype), shapes.experts) is None


def test_routing_results_are_contiguous():
    routes, slots, _ = drawn(2)
    assert all(each.flags.c_contiguous for each in (*routes, slots))


def test_weights_of_experts_selected_by_the_bias_are_accurate():
    """Their probabilities are 0 in float32, but the softmax of their logits is not."""
    logits, bias = np.float32([[0, 0, -200, -201]]), np.float32([-1, -1, 1, 1])
    found = routing.route(logits, 2, bias)
    assert found.experts.tolist() == [[2, 3]]
    np.testing.assert_allclose(found.weights, [[1 / (1 + np.exp(-1)), 1 / (1 + np.e)]], rtol=1e-6)
