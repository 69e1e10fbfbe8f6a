"""Expert load in mixture-of-experts models, and the cost of load imbalance.

Every expert has the same capacity (number of slots) for each routing group and computes all of its
slots, used or not. Load imbalance therefore does not slow down any matrix product. Its costs are
dropped tokens, which exceed the capacity of their expert, and unused capacity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.analyze.metrics.columns import combinations, event_values, named, rows_of, with_label
from hpc3d.analyze.metrics.pipeline_step import configuration
from hpc3d.analyze.metrics.step import step_seconds
from hpc3d.comm.mesh import EXPERTS
from hpc3d.model.families import expert_weights, family_of

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.steady import Steady
    from hpc3d.analyze.metrics.wait_states import CallInstances
    from hpc3d.config.input_file import Config
    from hpc3d.trace.reader import Trace

_BACKWARD = ("backward", "backward_input")  # backward phases, in which combine precedes dispatch
# A layer's dispatch and combine in the same pass have equal values in these columns.
_PASS = ("phase", "rank", "group", "step", "microbatch", "chunk", "layer")


class ExpertLoads(NamedTuple):
    """Number of tokens routed to each expert, by step and layer, summed over all ranks.

    Attributes
    ----------
    chosen
        Number of tokens routed to each expert, int64[steps, layers, experts].
    kept
        Number of these tokens that are within the expert's capacity, same shape.
    balance, z
        Auxiliary losses of the routers in nats per token, multiplied by their loss coefficients,
        shape [steps, layers].
    slots
        Capacity of an expert per step in tokens, or None if it is unknown or not limited.
    """

    steps: np.ndarray
    layers: np.ndarray
    chosen: np.ndarray
    kept: np.ndarray
    balance: np.ndarray
    z: np.ndarray
    slots: int | None

    @property
    def load(self) -> np.ndarray:
        """Return the number of tokens routed to each expert, relative to the mean over experts.

        The shape is [steps, layers, experts].
        """
        return _over(self.chosen, self.chosen.mean(2, keepdims=True))

    def of(self, steps: np.ndarray) -> ExpertLoads:
        """Return the expert loads, restricted to the given steps."""
        some = np.isin(self.steps, steps)
        by_step = (values[some] for values in self[2:6])
        return ExpertLoads(self.steps[some], self.layers, *by_step, self.slots)


def loads_of(trace: Trace) -> ExpertLoads | None:
    """Return the expert loads of an open trace, or None if the model has no experts."""
    table = trace.experts
    if not len(table):
        return None
    (steps, step), (layers, layer) = (
        np.unique(table[name], return_inverse=True) for name in ("step", "layer")
    )
    shape = len(steps), len(layers), 1 + int(table["expert"].max())
    chosen, kept = np.zeros((2, *shape), "i8")
    for total, name in ((chosen, "chosen"), (kept, "kept")):
        np.add.at(total, (step, layer, table["expert"]), table[name])
    losses = _losses(trace, steps, layers)
    config = configuration(trace)
    return ExpertLoads(steps, layers, chosen, kept, *losses, _slots(config) if config else None)


def _losses(trace, steps, layers):
    """Return the balance loss and the z loss in nats per token, shape [2, steps, layers]."""
    table, found = trace.routers, np.zeros((2, len(steps), len(layers)))
    where = np.searchsorted(steps, table["step"]), np.searchsorted(layers, table["layer"])
    for total, name in zip(found, ("balance_loss", "z_loss")):
        np.add.at(total, where, table[name])
    tokens = dict(zip(trace.steps["step"].tolist(), trace.steps["tokens"].tolist()))
    return _over(found, np.array([[tokens.get(step, 0)] for step in steps.tolist()]))


def _slots(config: Config) -> int | None:
    """Return the number of slots of an expert per step, summed over all routing groups.

    Without a capacity limit, the number depends on the load, and the result is `None`.
    """
    model = config.model
    form = family_of(model).sizes(model, model.vocabulary).experts
    if form is None or not form.capacity:
        return None
    group = config.routing_group()
    return config.train.batch * model.sequence // group * form.slots(group)


def _over(value, total):
    """Return value / total elementwise, with 0 for elements whose total is 0."""
    shape = np.broadcast_shapes(np.shape(value), np.shape(total))
    return np.divide(value, total, out=np.zeros(shape), where=np.asarray(total) > 0)


# Tables of a report


def router_rows(loads: ExpertLoads) -> list[dict[str, Any]]:
    """Return the expert loads, dropped tokens and auxiliary losses of each step and layer.

    The columns contain the maximum and the minimum load over all experts. `dropped` is the share
    of routed tokens that are dropped, and `empty` is the unused share of the capacity.
    """
    load, chosen, kept = loads.load, loads.chosen.sum(2), loads.kept.sum(2)
    count = loads.chosen.shape[2]
    columns = {
        "highest": load.max(2),
        "fullest": load.argmax(2),
        "lowest": load.min(2),
        "dropped": _over(chosen - kept, chosen),
        "balance_loss": loads.balance,
        "z_loss": loads.z,
    }
    if loads.slots:
        columns["empty"] = 1 - kept / (loads.slots * count)
    step, layer = np.meshgrid(loads.steps, loads.layers, indexing="ij")
    columns = {"step": step, "layer": layer, **columns}
    return rows_of({key: values.ravel() for key, values in columns.items()})


def expert_rows(loads: ExpertLoads) -> list[dict[str, Any]]:
    """Return one row per layer and expert with the share and load of the expert over all steps.

    `share` is the expert's share of the routed tokens, and `load` is the number of its tokens
    relative to the average expert. `dropped` is the share of the expert's tokens that are dropped,
    and `empty` is the unused share of its capacity.
    """
    chosen, kept = loads.chosen.sum(0), loads.kept.sum(0)
    share = _over(chosen, chosen.sum(1, keepdims=True))
    dropped, slots = _over(chosen - kept, chosen), (loads.slots or 0) * len(loads.steps)
    return [
        {
            "layer": int(layer),
            "expert": expert,
            "share": float(share[index, expert]),
            "load": float(share[index, expert] * chosen.shape[1]),
            "dropped": float(dropped[index, expert]),
            "empty": 1 - int(kept[index, expert]) / slots if slots else None,
        }
        for index, layer in enumerate(loads.layers.tolist())
        for expert in range(chosen.shape[1])
    ]


def exchange_rows(calls: CallInstances, timed: bool = True) -> list[dict[str, Any]]:
    """Return the call counts, bytes and times of dispatch and combine, per rank and step.

    Each row is for one mesh axis, one phase, and one operation (dispatch or combine). If `timed`,
    the rows include blocked_s = wait_s + transfer_s. The first all-to-all of a layer is the
    dispatch in a forward pass and the combine in a backward pass.
    """
    events, index = calls.trace.events, _exchanges(calls)
    row = calls.row[index]
    axis, phase = (event_values(calls.trace, key, row) for key in ("axis", "phase"))
    backward = with_label(events, "phase", _BACKWARD)[row]
    kinds, kind = combinations([axis, phase, (_order_in_pass(events, row) + backward) % 2])
    per = 1 / len(calls.trace.steps)
    columns = {"calls": np.ones(len(row)), "bytes": events["bytes"][row]}
    if timed:
        blocked, wait = (getattr(calls, name)[index] * 1e-9 for name in ("blocked", "wait"))
        columns |= {"blocked_s": blocked, "wait_s": wait, "transfer_s": blocked - wait}
    means = {name: np.bincount(kind, each, len(kinds)) * per for name, each in columns.items()}
    keys = named(calls.trace, ("axis", "phase"), kinds[:, :2])
    exchange = ("dispatch", "combine")
    return [
        {**names, "what": exchange[order], **row}
        for names, order, row in zip(keys, kinds[:, 2].tolist(), rows_of(means))
    ]


def _exchanges(calls):
    """Return the indices in `calls` of expert-parallel all-to-all calls in completed steps."""
    events, row = calls.trace.events, calls.row
    along = np.array([group.axis == EXPERTS for group in calls.trace.groups], bool)
    exchanges = calls.inside & calls.ending & with_label(events, "op", ["all_to_all"])[row]
    return np.flatnonzero(exchanges)[along[events["group"][row[exchanges]]]]


def _order_in_pass(events, row):
    """Return 0 for the first all-to-all of a layer in a pass and 1 for the second."""
    _, which = combinations([events[key][row] for key in _PASS])
    order = np.lexsort((events["seq"][row], which))
    first = np.flatnonzero(np.diff(which[order], prepend=-1))
    number = np.empty(len(row), int)
    number[order] = np.arange(len(row)) - np.repeat(first, np.diff([*first, len(row)]))
    return number % 2


def cost_row(
    trace: Steady, loads: ExpertLoads, calls: CallInstances | None = None
) -> dict[str, Any]:
    """Return the cost of load imbalance, averaged over the steps of `loads`.

    `dropped` is the share of the routed tokens that are dropped, and `empty` is the unused share
    of the capacity; `dropped_even` and `empty_even` are the values for a balanced load.
    `empty_flop` is the FLOP spent on unused slots in forward and backward passes, excluding
    recomputation.

    `wait_s` is the mean wait time of a rank in expert-parallel all-to-all calls. `rank` is the
    rank that causes the longest waits in these calls. `experts` are the experts of this rank, and
    `load` is their number of tokens within capacity relative to the average expert. Without such
    calls, the values in this paragraph are `None`.
    """
    chosen, kept = int(loads.chosen.sum()), int(loads.kept.sum())
    return {
        "slots": loads.slots,
        "highest": float(loads.load.max(2).mean()),
        "dropped": (chosen - kept) / max(1, chosen),
        **_capacity_use(trace, loads, chosen, kept),
        **_waits(trace, loads, calls),
    }


def _capacity_use(trace, loads, chosen, kept):
    """Return the entries of `cost_row` that depend on the expert capacity.

    If the capacity is unknown, their values are `None`.
    """
    if not loads.slots:
        return dict.fromkeys(("dropped_even", "empty", "empty_even", "empty_flop"))
    slots, model = loads.slots * loads.chosen.size, configuration(trace).model
    matrices = expert_weights(model) / np.prod(loads.chosen.shape[1:])  # parameters of one expert
    return {
        "dropped_even": max(0.0, 1 - slots / chosen),
        "empty": 1 - kept / slots,
        "empty_even": max(0.0, 1 - chosen / slots),
        "empty_flop": float(6 * (slots - kept) / len(loads.steps) * matrices),
    }


def _waits(trace, loads, calls):
    index = _exchanges(calls) if calls else np.zeros(0, int)
    if not len(index):
        return dict.fromkeys(("wait_s", "wait_share", "rank", "experts", "load"))
    wait, ranks = calls.wait[index] * 1e-9, trace.attrs["world_size"]
    total, steps = wait.sum(), step_seconds(trace).sum()
    rank = int(np.bincount(calls.by[index], wait, ranks).argmax())
    return {
        "wait_s": float(total / len(trace.steps)),
        "wait_share": float(total / steps) if steps else None,
        "rank": rank,
        **_experts_of(trace, loads, rank),
    }


def _experts_of(trace, loads, rank):
    """Return the range of experts on a rank, and their load relative to the average expert."""
    axis = trace.attrs["axes"].split().index(EXPERTS)
    count = loads.chosen.shape[2]
    per_rank = count // trace.attrs["axis_sizes"][axis]
    first = int(trace.ranks["coords"][rank, axis]) * per_rank
    kept = loads.kept.sum((0, 1))
    last = first + per_rank - 1
    return {
        "experts": f"{first} to {last}" if per_rank > 1 else f"{first}",
        "load": float(_over(kept[first : last + 1].mean(), kept.mean())),
    }
