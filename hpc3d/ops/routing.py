"""Routing of tokens in a mixture of experts: selection, dispatch, combination, and gradients.

A *choice* is one of the top_k experts to which a token is routed. A *routing group* is a range of
consecutive rows among which the capacity of the experts is shared. A *slot* is a row of the
capacity buffer that the experts process. The buffer has shape [e R, E/e, h] for E experts sharded
over e ranks, where R is the number of slots per expert for the tokens of one rank. The slot of a
dropped choice is -1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.array import Array
from hpc3d.arrays.narrow import wide
from hpc3d.arrays.primitive import primitive
from hpc3d.ops.rows import in_float32, row_blocks
from hpc3d.ops.update import sum_parts

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.cuda.gpu import Gpu


class Routes(NamedTuple):
    """Routing decisions for n tokens.

    `experts` is int64[n, k] in descending order of probability, `weights` [n, k] are the gate
    weights of the experts' outputs, `probs` is [n, E], and `lse` [n] is the log-sum-exp of the
    logits.
    """

    experts: Array
    weights: Array
    probs: Array
    lse: Array


class SlotForm(NamedTuple):
    """Layout of the slot buffer [e R, E/e, h].

    A routing group has `tokens` tokens. E = `count` experts are sharded over e = `parts` ranks.
    Each expert has `capacity` slots per routing group, at most `tokens`. The buffer has R = `rows`
    rows per rank.
    """

    tokens: int
    count: int
    capacity: int
    parts: int
    rows: int


class RouterLoss(NamedTuple):
    """Inputs of the router's auxiliary losses that are not in `Routes`.

    `shares` [S, E] is the fraction f of each sequence's routed tokens that each expert receives.
    `first` is the index of the block's first row in these sequences. `tokens` is the number
    of tokens per sequence, `balance` is E times the coefficient of the balance loss, and `z` is
    the coefficient of the z-loss.
    """

    shares: Array
    first: int
    tokens: int
    balance: float
    z: float


@primitive
def route(logits: Array, top_k: int, bias: Array | None = None) -> Routes:
    """Select the experts with the largest p (+ bias), where p is the softmax of a token's logits.

    Ties go to the lower index. If top_k = 1, the weight is p (Switch). Otherwise, the weight is p
    divided by the sum of p over the selected experts (GShard), which equals the softmax of their
    logits.
    """
    top = logits.max(1, initial=-np.inf)
    probs = np.exp(logits - top[:, None])
    sums = probs.sum(1)
    probs /= sums[:, None]
    scores = probs if bias is None else probs + bias
    experts = np.argsort(-scores, axis=1, kind="stable")[:, :top_k].copy()
    if top_k == 1:
        weights = np.take_along_axis(probs, experts, 1)
    else:
        weights = np.take_along_axis(logits, experts, 1)
        weights = np.exp(weights - weights.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
    return Routes(experts, weights, probs, top + np.log(sums))


route.states("mE E -> mk mk mE m")


@route.abstract
def _(logits, top_k, bias=None):
    rows, count = logits.shape
    chosen = rows, top_k
    like, real = logits.like, wide(logits.dtype)
    shapes = chosen, (rows, count), (rows,)
    return Routes(like(chosen, np.int64), *(like(shape, real) for shape in shapes))


@route.cuda
def _(gpu, logits, top_k, bias=None):
    (rows, count), real = logits.shape, np.float32
    experts = gpu.empty((rows, top_k), np.int64)
    weights, probs = (gpu.empty((rows, columns), real) for columns in (top_k, count))
    routes = Routes(experts, weights, probs, gpu.empty((rows,), real))
    given = {"logits": logits, "bias": bias, "count": count, "top_k": top_k}
    gpu.launch("route", rows, count, **given, **routes._asdict())
    return routes


@primitive
def counts_of(choices: Array, tokens: int, count: int) -> Array:
    """Count the tokens that are routed to each of `count` experts; return int64[groups, E].

    The counts are separate for each routing group, which has `tokens` tokens.
    """
    rows, top_k = choices.shape
    groups = rows // tokens
    queues = choices.reshape(groups, tokens * top_k) + count * np.arange(groups)[:, None]
    return np.bincount(queues.ravel(), minlength=groups * count).reshape(groups, count)


@counts_of.abstract
def _(choices, tokens, count):
    return choices.like((len(choices) // tokens, count), np.int64)


@counts_of.cuda
def _(gpu, choices, tokens, count):
    rows, top_k = choices.shape
    counts, size = gpu.empty((rows // tokens, count), np.int64), tokens * top_k
    given = {"choices": choices, "counts": counts}
    gpu.launch("counts_of", counts.size, size, **given, size=size, count=count)
    return counts


@primitive
def slots_of(choices: Array, form: SlotForm) -> Array:
    """Assign an expert slot to each choice of each token; return the slot indices, int64[n, k].

    Within a routing group, an expert's slots are assigned to all first choices before any second
    choice, and so on, each in order of token position.
    """
    (rows, top_k), (tokens, count, capacity, parts, held) = choices.shape, form
    groups, here = rows // tokens, count // parts
    queues = choices.reshape(groups, tokens, top_k).swapaxes(1, 2)
    queues = queues.reshape(groups, top_k * tokens)
    order = np.argsort(queues, axis=1, kind="stable")  # sorted by expert, then by position
    counts = counts_of(choices, tokens, count)
    lower = counts.cumsum(1) - counts  # tokens routed to experts of lower index
    positions = np.empty_like(queues)
    np.put_along_axis(positions, order, np.arange(top_k * tokens)[None], 1)
    positions -= np.take_along_axis(lower, queues, 1)
    part, local = np.divmod(queues, here)
    row = part * held + np.arange(groups)[:, None] * capacity + positions
    slots = np.where(positions < capacity, row * here + local, -1)
    by_token = slots.reshape(groups, top_k, tokens).swapaxes(1, 2)
    return np.ascontiguousarray(by_token).reshape(rows, top_k)


@slots_of.abstract
def _(choices, form):
    return choices.like(choices.shape)


@slots_of.cuda
def _(gpu, choices, form):
    (rows, top_k), (tokens, count, capacity, parts, held) = choices.shape, form
    slots = gpu.empty(choices.shape, np.int64)
    sizes = {"tokens": tokens, "top_k": top_k, "count": count}
    sizes |= {"local": count // parts, "capacity": capacity, "held": held}
    given = {"choices": choices, "slots": slots}
    gpu.launch("slots_of", rows // tokens * count, tokens * top_k, **given, **sizes)
    return slots


@primitive
def shares_of(counts: Array, choices: int, dtype: DTypeLike) -> Array:
    """Return the fraction of each sequence's routed tokens that each expert receives, [S, E].

    `choices` is the number of routed tokens per sequence. `counts` [c, S, groups, E] covers the
    routing groups of each sequence on all c context-parallel ranks.
    """
    return (counts.sum((0, 2)) / choices).astype(dtype)


@shares_of.abstract
def _(counts, choices, dtype):
    return counts.like((counts.shape[1], counts.shape[3]), dtype)


@shares_of.cuda
def _(gpu, counts, choices, dtype):
    ranks, sequences, groups, count = counts.shape
    shares = gpu.empty((sequences, count), dtype)
    given = {"counts": counts, "shares": shares, "choices": choices}
    sizes = {"ranks": ranks, "sequences": sequences, "groups": groups, "count": count}
    gpu.launch("shares_of", shares.size, 1, **given, **sizes)
    return shares


@primitive
def load_of(choices: Array, slots: Array, count: int) -> tuple[Array, Array]:
    """Return each expert's number of routed tokens and number of occupied slots, int64[E] each."""
    kept = choices[slots >= 0]
    return np.bincount(choices.ravel(), minlength=count), np.bincount(kept, minlength=count)


@load_of.abstract
def _(choices, slots, count):
    return choices.like((count,)), choices.like((count,))


@load_of.cuda
def _(gpu, choices, slots, count):
    chosen, kept = (gpu.empty((count,), np.int64) for _ in range(2))
    given = {"choices": choices, "slots": slots, "chosen": chosen, "kept": kept}
    gpu.launch("load_of", count, choices.size, size=choices.size, **given)
    return chosen, kept


@primitive
def add_excess(grad: Array, choices: Array) -> None:
    """For each of the E experts, add E (count - mean count) to `grad`.

    `count` is the number of tokens routed to the expert. The factor E makes the sum an integer.
    """
    found = np.bincount(choices.ravel(), minlength=grad.size)
    grad += grad.size * found - choices.size


add_excess.abstract(lambda grad, choices: None)
add_excess.states("E mk")


@add_excess.cuda
def _(gpu, grad, choices):
    size = choices.size
    gpu.launch("add_excess", grad.size, size, grad=grad, choices=choices, size=size)


@primitive
def dispatch(x: Array, slots: Array, out: Array) -> Array:
    """Copy the rows of x into their slots, and fill the other slots with zeros."""
    out.fill(0)
    for rows in row_blocks(x):
        for _, kept, at in _kept(slots[rows]):
            out[at] = x[rows][kept]
    return out


def _kept(slots: Array) -> Iterator[tuple[int, Array, Array]]:
    """Yield, for each choice index, the tokens that have a slot, and their slots."""
    for choice, column in enumerate(slots.T):
        kept = np.flatnonzero(column >= 0)
        yield choice, kept, column[kept]


dispatch.narrow(dispatch.numpy)
dispatch.abstract(lambda x, slots, out: out)


@dispatch.cuda
def _(gpu, x, slots, out):
    given = {"x": x, "takers": _takers(gpu, slots, len(out)), "out": out}
    gpu.launch("dispatch", *out.shape, top_k=slots.shape[1], columns=out.shape[1], **given)
    return out


def _takers(gpu: Gpu, slots: Array, rows: int) -> Array:
    """For each slot, return the index token * k + choice of its token, or -1 if it is empty."""
    takers = gpu.empty((rows,), np.int64)
    takers.fill(-1)
    gpu.launch("takers_of", 1, slots.size, slots=slots, takers=takers, size=slots.size)
    return takers


@primitive
def dispatch_grad(dslots: Array, slots: Array, out: Array) -> Array:
    """Compute the gradient of x: for each token, the sum of the gradients of its slots."""
    out.fill(0)
    for rows in row_blocks(out):
        for _, kept, at in _kept(slots[rows]):
            out[rows][kept] += dslots[at]
    return out


@dispatch_grad.narrow
def _(dslots, slots, out):
    in_float32(lambda rows, block: dispatch_grad.numpy(dslots, slots[rows], block), out)
    return out


dispatch_grad.abstract(lambda dslots, slots, out: out)


@dispatch_grad.cuda
def _(gpu, dslots, slots, out):
    return combine.cuda_rule(gpu, dslots, slots, None, out)


@primitive
def combine(y: Array, slots: Array, weights: Array, out: Array) -> Array:
    """Compute each token's output: the gate-weighted sum of the rows in its slots."""
    out.fill(0)
    for rows in row_blocks(out):
        for choice, kept, at in _kept(slots[rows]):
            out[rows][kept] += weights[rows][kept, choice, None] * y[at]
    return out


@combine.narrow
def _(y, slots, weights, out):
    in_float32(lambda rows, block: combine.numpy(y, slots[rows], weights[rows], block), out)
    return out


combine.abstract(lambda y, slots, weights, out: out)


@combine.cuda
def _(gpu, y, slots, weights, out):
    sizes = {"top_k": slots.shape[1], "columns": out.shape[1]}
    gpu.launch("combine", *out.shape, y=y, slots=slots, weights=weights, out=out, **sizes)
    return out


@primitive
def combine_grad(
    dout: Array, y: Array, slots: Array, weights: Array, out: Array
) -> tuple[Array, Array]:
    """Compute the gradients of the slots, written to `out`, and of the gate weights.

    The gradient of the gate weights is a partial sum over this rank's columns.
    """
    out.fill(0)
    dweights = np.zeros_like(weights)
    for rows in row_blocks(dout):
        for choice, kept, at in _kept(slots[rows]):
            grad = dout[rows][kept]
            dweights[rows][kept, choice] = np.einsum("ij,ij->i", y[at], grad)
            out[at] = np.multiply(grad, weights[rows][kept, choice, None], out=grad)
    return out, dweights


combine_grad.narrow(combine_grad.numpy)


combine_grad.states("mh mh mk mk mh -> mh mk")


@combine_grad.abstract
def _(dout, y, slots, weights, out):
    return out, weights.like(weights.shape)


@combine_grad.cuda
def _(gpu, dout, y, slots, weights, out):
    dweights = gpu.empty(weights.shape, np.float32)
    dweights.fill(0)
    given = {"dout": dout, "y": y, "takers": _takers(gpu, slots, len(out)), "weights": weights}
    sizes = {"top_k": slots.shape[1], "columns": out.shape[1]}
    gpu.launch("combine_grad", *out.shape, out=out, dweights=dweights, **given, **sizes)
    return out, dweights


@primitive
def router_loss(probs: Array, lse: Array, loss: RouterLoss) -> tuple[Any, Any]:
    """Return the balance loss and the z-loss of this rank's rows.

    The balance loss is the sum over rows and experts of alpha E f P, where f is the fraction of
    the sequence's routed tokens that the expert receives, and P is the expert's probability. The
    z-loss is the sum over rows of z lse^2.
    """
    balance = loss.balance * float(np.vdot(_shares(loss, len(lse)), probs))
    return balance, loss.z * float(np.dot(lse, lse))


router_loss.abstract(lambda probs, lse, loss: (0.0, 0.0))


@router_loss.cuda
def _(gpu, probs, lse, loss):
    losses = gpu.empty((2, len(probs)), np.float32)
    given = {"probs": probs, "lse": lse, "losses": losses, "count": probs.shape[1]}
    gpu.launch("router_loss", *probs.shape, **given, **loss._asdict())
    return sum_parts(gpu, losses[0]), sum_parts(gpu, losses[1])


def _shares(loss: RouterLoss, rows: int) -> Array:
    """Return, for each row, the fractions f (`loss.shares`) of its sequence, [n, E]."""
    return loss.shares[(loss.first + np.arange(rows)) // loss.tokens]


@primitive
def route_grad(
    dweights: Array, routes: Routes, loss: RouterLoss, scale: float, out: Array
) -> Array:
    """Compute the gradient of the logits.

    The result is the sum of the gradient through the gate weights and `scale` times the gradient
    of the router losses.
    """
    experts, weights, probs, lse = routes
    dprobs = _shares(loss, len(lse)) * (loss.balance * scale)
    chosen = np.arange(len(experts))[:, None], experts
    if experts.shape[1] == 1:
        dprobs[chosen] += dweights
    dprobs -= np.einsum("ij,ij->i", dprobs, probs)[:, None]
    dprobs += (2 * loss.z * scale * lse)[:, None]
    np.multiply(probs, dprobs, out=out)
    if experts.shape[1] > 1:  # the gate weights are the softmax of the chosen logits
        out[chosen] += weights * (dweights - np.einsum("ij,ij->i", weights, dweights)[:, None])
    return out


route_grad.abstract(lambda dweights, routes, loss, scale, out: out)


@route_grad.cuda
def _(gpu, dweights, routes, loss, scale, out):
    given = {"dweights": dweights, "scale": scale, "dlogits": out}
    given |= {"count": out.shape[1], "top_k": dweights.shape[1]}
    gpu.launch("route_grad", *out.shape, **given, **routes._asdict(), **loss._asdict())
    return out
