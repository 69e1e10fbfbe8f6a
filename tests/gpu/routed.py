"""Mixture-of-experts kernels, called through their rules, compared with NumPy in float64: up to
300 experts, up to 8 choices, several routing groups per sequence, and dropped choices."""

import numpy as np

from hpc3d.cuda.gpu import Gpu
from hpc3d.ops import routing
from hpc3d.ops.routing import RouterLoss, SlotForm

SEQUENCES = 3
# Experts, choices, ranks along e: of one warp, of two, more than the threads of a block.
FORMS = ((1, 1, 1), (8, 2, 2), (40, 8, 8), (300, 3, 3))


def ruled(bench):
    """Return the CUDA rule of a primitive, for host arrays that the bench's launcher accepts."""

    def empty(shape, dtype):
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8).fill(0xFF)
        return array

    gpu = Gpu(bench.launch, None, None, empty, np.float32)
    return lambda primitive, *given: primitive.cuda_rule(gpu, *given)


def logits_of(bench, rows, count):
    """Return multiples of 1/16, which are exact in every type, so that ties remain ties."""
    x = np.round(16 * bench.random.standard_normal((rows, count))) / 16
    return x.astype(bench.real), x


def route(bench, notes):
    rule = ruled(bench)
    for count, top_k, _ in FORMS:
        logits, wide = logits_of(bench, bench.sizes.rows, count)
        bias = bench.random.integers(0, 2, count) / 2
        for given in (None, bias):
            expected = routing.route(wide, top_k, given)
            cast = None if given is None else given.astype(bench.real)
            found = rule(routing.route, logits, top_k, cast)
            what = f"{top_k} of {count}{'' if given is None else ' with a bias'}"
            notes.same(f"experts, {what}", found.experts, expected.experts, 0)
            for name in ("weights", "probs", "lse"):
                got, wanted = getattr(found, name), getattr(expected, name)
                notes.same(f"{name}, {what}", got, wanted, 5e-6, 1e-7)


def slots(bench, notes):
    """Check slots and all counts."""
    rule, tokens = ruled(bench), bench.sizes.sequence
    groups = next(number for number in (2, 7, 1) if tokens % number == 0)
    for count, top_k, parts in FORMS:
        choices = choices_of(bench, count, top_k)
        what = f"{top_k} of {count}"

        def same(name, primitive, *given, what=what):
            got, expected = rule(primitive, *given), primitive(*given)
            notes.same(f"{name}, {what}", got, expected, 1e-6 if got.dtype == np.float32 else 0)
            return expected

        counts = same("counts_of", routing.counts_of, choices, tokens // groups, count)
        counts = counts.reshape(SEQUENCES, groups, count)
        all_ranks = np.stack([counts, counts[::-1]])
        same("shares_of", routing.shares_of, all_ranks, 2 * tokens * top_k, np.float32)
        for capacity in (1, tokens, -(-tokens * top_k // count)):
            room = min(tokens, capacity)
            form = SlotForm(tokens, count, room, parts, SEQUENCES * room + 1)
            found = same(f"slots_of {capacity}", routing.slots_of, choices, form)
        got = rule(routing.load_of, choices, found, count)
        notes.same(f"load_of, {what}", got, routing.load_of(choices, found, count), 0)
        grad, expected = np.ones((2, count), np.float32)
        rule(routing.add_excess, grad, choices)
        routing.add_excess(expected, choices)
        notes.same(f"add_excess, {what}", grad, expected, 0)


def rows_of_slots(bench, notes):
    """Check dispatch and combine with their gradients; a third of the choices has no slot."""
    rule, tokens, columns = ruled(bench), bench.sizes.sequence, bench.sizes.hidden
    for count, top_k, parts in FORMS[:3]:
        choices, what = choices_of(bench, count, top_k), f", {top_k} of {count}"
        capacity = min(tokens, max(1, 2 * tokens * top_k // (3 * count)))
        form = SlotForm(tokens, count, capacity, parts, SEQUENCES * capacity + 1)
        found = routing.slots_of(choices, form)
        weights = bench.random.random(choices.shape, np.float32)
        held = count * form.rows
        (x, wide_x), (y, wide_y) = bench.draw(len(found), columns), bench.draw(held, columns)
        out, back = bench.empty(held, columns), bench.empty(len(found), columns)
        rule(routing.dispatch, x, found, out)
        expected = routing.dispatch(wide_x, found, np.empty_like(wide_y))
        notes.same(f"dispatch{what}", out, expected, 0)
        rule(routing.dispatch_grad, y, found, back)
        expected = routing.dispatch_grad(wide_y, found, np.empty_like(wide_x))
        bench.same(notes, f"dispatch_grad{what}", back, expected)
        rule(routing.combine, y, found, weights, back)
        expected = routing.combine(wide_y, found, weights, np.empty_like(wide_x))
        bench.same(notes, f"combine{what}", back, expected)
        out, dweights = rule(routing.combine_grad, x, y, found, weights, out)
        wide = weights.astype(np.float64), np.empty_like(wide_y)
        expected, wanted = routing.combine_grad(wide_x, wide_y, found, *wide)
        bench.same(notes, f"combine_grad{what}", out, expected)
        notes.same(f"dweights{what}", dweights, wanted, 2e-6, 1e-5 * columns**0.5)


def router_losses(bench, notes):
    """Check router losses of rows inside the sequences (a rank along k), and their gradients."""
    rule, tokens = ruled(bench), bench.sizes.sequence
    first, rows = tokens // 2, 2 * tokens
    for count, top_k, _ in FORMS:
        what = f", {top_k} of {count}"
        routes = routing.route(bench.random.standard_normal((rows, count), np.float32), top_k)
        shares = bench.random.random((SEQUENCES, count), np.float32)
        loss = RouterLoss(shares, first, tokens, 0.01 * count, 0.001)
        wide = loss._replace(shares=shares.astype(np.float64))
        wide_routes = routing.Routes(
            routes.experts, *(each.astype(np.float64) for each in routes[1:])
        )
        found = rule(routing.router_loss, routes.probs, routes.lse, loss)
        expected = routing.router_loss(wide_routes.probs, wide_routes.lse, wide)
        notes.same(f"losses{what}", np.ravel(found), expected, 1e-5)
        dweights = bench.random.standard_normal(routes.weights.shape, np.float32)
        out = bench.empty(rows, count)
        rule(routing.route_grad, dweights, routes, loss, np.float32([0.5]), out)
        given = dweights.astype(np.float64), wide_routes, wide, 0.5
        expected = routing.route_grad(*given, np.empty((rows, count)))
        bench.same(notes, f"route_grad{what}", out, expected, 1e-6)


def choices_of(bench, count, top_k):
    """Return the experts of tokens in SEQUENCES; some experts are chosen much more often."""
    logits = bench.random.standard_normal((SEQUENCES * bench.sizes.sequence, count))
    logits += np.linspace(2, 0, count)
    return routing.route(logits, top_k).experts


KERNELS = route, rows_of_slots, router_losses
