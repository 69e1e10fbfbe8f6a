"""Where the tokens of a mixture of experts go, and what comes back.

A *choice* is one of the top_k experts of a token; a *slot* is a row of the buffer [e R, E/e, h]
that experts work on, or -1 of a choice that is dropped.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.primitive import primitive

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array


class Routes(NamedTuple):
    """What a router decides of n tokens: `experts` int64[n, k] in falling order of their
    probability, `weights` [n, k] of what they answer, `probs` [n, E], `lse` [n] of the logits."""

    experts: Array
    weights: Array
    probs: Array
    lse: Array


class SlotForm(NamedTuple):
    """How slots lie: sequences of which a rank has `tokens`, `count` experts on `parts` ranks,
    `capacity` slots of each for a sequence, in `rows` rows for each rank of e."""

    tokens: int
    count: int
    capacity: int
    parts: int
    rows: int


class RouterLoss(NamedTuple):
    """What the losses of a router are made of beside its routes: `shares` [S, E], f of every
    sequence; the number of the `first` of its rows among these; `balance` = alpha E, and `z`."""

    shares: Array
    first: int
    tokens: int
    balance: float
    z: float


@primitive
def route(logits: Array, top_k: int, bias: Array | None = None) -> Routes:
    """The experts with the largest p (+ bias), p the softmax of a token's logits; of equal ones
    the lower.  With one choice its weight is p (Switch), else p over the sum of the chosen
    (GShard)."""
    top = logits.max(1, initial=-np.inf)
    probs = np.exp(logits - top[:, None])
    sums = probs.sum(1)
    probs /= sums[:, None]
    scores = probs if bias is None else probs + bias
    experts = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(probs, experts, 1)
    if top_k > 1:
        weights /= weights.sum(1, keepdims=True)
    return Routes(experts, weights, probs, top + np.log(sums))


@route.abstract
def _(logits, top_k, bias=None):
    rows, count = logits.shape
    chosen = rows, top_k
    like = logits.like
    return Routes(like(chosen, np.int64), like(chosen), like((rows, count)), like((rows,)))


@primitive
def counts_of(choices: Array, tokens: int, pieces: int, count: int) -> Array:
    """int64[S, k, pieces, E]: how many of the first, second, ... choices of the tokens in each
    piece of a sequence are this expert."""
    rows, top_k = choices.shape
    sequence, token = np.divmod(np.arange(rows), tokens)
    piece = token // (tokens // pieces)
    group = (sequence[:, None] * top_k + np.arange(top_k)) * pieces + piece[:, None]
    shape = rows // tokens, top_k, pieces, count
    found = np.bincount((group * count + choices).ravel(), minlength=prod(shape))
    return found.reshape(shape)


@counts_of.abstract
def _(choices, tokens, pieces, count):
    return choices.like((len(choices) // tokens, choices.shape[1], pieces, count), np.int64)


@primitive
def before_of(counts: Array, precedes: Array) -> Array:
    """int64[S, k, pieces, E]: how many choices of other ranks, whose `counts` [c, S, k, pieces, E]
    are all ranks', precede these; `precedes` [k, pieces, c, k, pieces] is 1 of those that do."""
    found = np.tensordot(precedes, counts, ([2, 3, 4], [0, 2, 3]))  # [k, pieces, S, E]
    return np.ascontiguousarray(found.transpose(2, 0, 1, 3))


@before_of.abstract
def _(counts, precedes):
    return counts.like(counts.shape[1:])


@primitive
def slots_of(choices: Array, form: SlotForm, before: Array | None = None) -> Array:
    """int64[n, k]: those of a sequence take the slots of their expert in the order of their
    positions, second choices after all first ones; `before` are choices of other ranks that take
    slots before these do (`before_of`)."""
    rows, top_k = choices.shape
    tokens, count, capacity, parts, held = form
    sequences = rows // tokens
    queued = choices.reshape(sequences, tokens, top_k).swapaxes(1, 2).reshape(sequences, -1)
    order = np.argsort(queued, axis=1, kind="stable")
    sorted_ = np.take_along_axis(queued, order, 1)
    heads = (sorted_[:, :, None] < np.arange(count)).sum(1)  # choices of lower experts
    places = np.empty_like(queued)
    ranks = np.arange(queued.shape[1]) - np.take_along_axis(heads, sorted_, 1)
    np.put_along_axis(places, order, ranks, 1)
    part, local = np.divmod(queued, count // parts)
    row = part * held + np.arange(sequences)[:, None] * min(capacity, tokens) + places
    if before is not None:
        ahead = before.repeat(tokens // before.shape[2], 2).reshape(*queued.shape, count)
        places += np.take_along_axis(ahead, queued[:, :, None], 2)[:, :, 0]
    slots = np.where(places < capacity, row * (count // parts) + local, -1)
    by_token = slots.reshape(sequences, top_k, tokens).swapaxes(1, 2)
    return np.ascontiguousarray(by_token).reshape(rows, top_k)


@slots_of.abstract
def _(choices, form, before=None):
    return choices.like(choices.shape)


@primitive
def shares_of(counts: Array, tokens: int, dtype: DTypeLike) -> Array:
    """[S, E]: the share of the choices of a sequence of so many tokens that are this expert, from
    the `counts` [c, S, k, pieces, E] of all ranks."""
    return (counts.sum((0, 2, 3)) / (tokens * counts.shape[2])).astype(dtype)


@shares_of.abstract
def _(counts, tokens, dtype):
    return counts.like((counts.shape[1], counts.shape[4]), dtype)


@primitive
def load_of(choices: Array, slots: Array, count: int) -> tuple[Array, Array]:
    """int64[E] each: the choices that fell on an expert, and those of them that found a slot."""
    kept = choices[slots >= 0]
    return np.bincount(choices.ravel(), minlength=count), np.bincount(kept, minlength=count)


@load_of.abstract
def _(choices, slots, count):
    return choices.like((count,)), choices.like((count,))


@primitive
def add_excess(grad: Array, choices: Array) -> None:
    """Add E times the excess of each expert's choices over the mean, which are whole numbers."""
    found = np.bincount(choices.ravel(), minlength=grad.size)
    grad += grad.size * found - choices.size


@add_excess.abstract
def _(grad, choices):
    return None


@primitive
def dispatch(x: Array, slots: Array, out: Array) -> Array:
    """The rows of X in their slots, and zeros in the others."""
    out.fill(0)
    for column in slots.T:
        kept = np.flatnonzero(column >= 0)
        out[column[kept]] = x[kept]
    return out


@dispatch.abstract
def _(x, slots, out):
    return out


@primitive
def dispatch_grad(dslots: Array, slots: Array, out: Array) -> Array:
    """The gradient of X: the sum of those of its slots."""
    out.fill(0)
    for column in slots.T:
        kept = np.flatnonzero(column >= 0)
        out[kept] += dslots[column[kept]]
    return out


@dispatch_grad.abstract
def _(dslots, slots, out):
    return out


@primitive
def combine(y: Array, slots: Array, weights: Array, out: Array) -> Array:
    """The sum over a token's choices of the weight times the row of the slot."""
    out.fill(0)
    for column, weight in zip(slots.T, weights.T, strict=True):
        kept = np.flatnonzero(column >= 0)
        out[kept] += weight[kept, None] * y[column[kept]]
    return out


@combine.abstract
def _(y, slots, weights, out):
    return out


@primitive
def combine_grad(
    dout: Array, y: Array, slots: Array, weights: Array, out: Array
) -> tuple[Array, Array]:
    """The gradient of the slots, in `out`, and that of the weights from these columns."""
    out.fill(0)
    dweights = np.zeros_like(weights)
    for number, column in enumerate(slots.T):
        kept = np.flatnonzero(column >= 0)
        rows, grad = column[kept], dout[kept]
        out[rows] = weights[kept, number, None] * grad
        dweights[kept, number] = np.einsum("ij,ij->i", y[rows], grad)
    return out, dweights


@combine_grad.abstract
def _(dout, y, slots, weights, out):
    return out, weights.like(weights.shape)


@primitive
def router_loss(routes: Routes, loss: RouterLoss) -> tuple[Any, Any]:
    """The sums over rows of alpha E f P of their sequence, and of z lse^2."""
    share = loss.shares[_sequences(routes, loss)]
    balance = loss.balance * float(np.vdot(share, routes.probs))
    return balance, loss.z * float(np.dot(routes.lse, routes.lse))


@router_loss.abstract
def _(routes, loss):
    return 0.0, 0.0


def _sequences(routes, loss):
    """The number of the sequence of every row."""
    return (loss.first + np.arange(len(routes.lse))) // loss.tokens


@primitive
def route_grad(dweights: Array, routes: Routes, loss: RouterLoss, scale: float) -> Array:
    """The gradient of the logits: of what the weights do, and of the losses times `scale`."""
    experts, weights, probs, lse = routes
    dprobs = loss.shares[_sequences(routes, loss)] * (loss.balance * scale)
    if experts.shape[1] == 1:
        rows = np.arange(len(experts))
        dprobs[rows, experts[:, 0]] += dweights[:, 0]
    dlogits = probs * (dprobs - np.einsum("ij,ij->i", dprobs, probs)[:, None])
    dlogits += probs * (2 * loss.z * scale * lse)[:, None]
    if experts.shape[1] > 1:
        mean = np.einsum("ij,ij->i", weights, dweights)[:, None]
        np.add.at(
            dlogits, (np.arange(len(experts))[:, None], experts), weights * (dweights - mean)
        )
    return dlogits


@route_grad.abstract
def _(dweights, routes, loss, scale):
    return routes.probs.like(routes.probs.shape)
