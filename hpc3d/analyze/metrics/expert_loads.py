"""Where the tokens of mixtures of experts went, and what it cost that some experts had more.

An expert has the same number of slots for every sequence, and all of them are computed, full or
not.  So an imbalance makes no product longer: what it costs are the tokens that find no slot, and
the slots that find no token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.analyze.metrics.columns import combinations, event_values, labelled, named
from hpc3d.analyze.metrics.pipeline_step import configuration
from hpc3d.analyze.metrics.step import step_seconds
from hpc3d.comm.mesh import EXPERTS
from hpc3d.model.families import expert_weights, family_of

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.steady import Steady
    from hpc3d.analyze.metrics.wait_states import CallInstances
    from hpc3d.config.input_file import Config
    from hpc3d.trace.reader import Trace

_BACKWARD = ("backward", "backward_input")  # phases in which combine comes before dispatch
_PASS = ("phase", "rank", "group", "step", "microbatch", "chunk", "layer")  # two exchanges each


class ExpertLoads(NamedTuple):
    """The choices of all ranks by step, layer and expert, int64[steps, layers, E]: those `chosen`,
    and those `kept`, which found a slot; losses of routers [steps, layers] in nat a token, times
    their factors; and the `slots` of an expert in a step, None where they are not known."""

    steps: np.ndarray
    layers: np.ndarray
    chosen: np.ndarray
    kept: np.ndarray
    balance: np.ndarray
    z: np.ndarray
    slots: int | None

    @property
    def load(self) -> np.ndarray:
        """Choices of an expert over those of the mean one of its step and layer."""
        return _over(self.chosen, self.chosen.mean(2, keepdims=True))

    def of(self, steps: np.ndarray) -> ExpertLoads:
        """The same of some steps."""
        some = np.isin(self.steps, steps)
        by_step = (values[some] for values in self[2:6])
        return ExpertLoads(self.steps[some], self.layers, *by_step, self.slots)


def loads_of(trace: Trace) -> ExpertLoads | None:
    """The ExpertLoads of an open trace, None where there are no experts."""
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
    """Both losses [2, steps, layers] in nat a token of the batch."""
    table, found = trace.routers, np.zeros((2, len(steps), len(layers)))
    where = np.searchsorted(steps, table["step"]), np.searchsorted(layers, table["layer"])
    for total, name in zip(found, ("balance_loss", "z_loss")):
        np.add.at(total, where, table[name])
    tokens = dict(zip(trace.steps["step"].tolist(), trace.steps["tokens"].tolist()))
    return _over(found, np.array([[tokens.get(step, 0)] for step in steps.tolist()]))


def _slots(config: Config) -> int | None:
    """The slots of an expert for the sequences of a step: of each rank along c for its tokens."""
    model, context = config.model, config.context()
    form = family_of(model).sizes(model, model.vocabulary).experts
    if form is None:
        return None
    here = min(context.tokens, form.slots(model.sequence))
    return config.train.batch * context.parts * here


def _over(value, whole):
    """value / whole, 0 where there is nothing."""
    shape = np.broadcast_shapes(np.shape(value), np.shape(whole))
    return np.divide(value, whole, out=np.zeros(shape), where=np.asarray(whole) > 0)


# Tables


def router_rows(loads: ExpertLoads) -> list[dict[str, Any]]:
    """One row per step and layer: the load of the fullest expert and of the emptiest, the shares
    of choices that are dropped and of slots that stay empty, and both losses."""
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
    where = np.stack(np.meshgrid(loads.steps, loads.layers, indexing="ij"), -1).reshape(-1, 2)
    values = zip(*(column.ravel().tolist() for column in columns.values()))
    return [
        {"step": step, "layer": layer, **dict(zip(columns, each))}
        for (step, layer), each in zip(where.tolist(), values)
    ]


def expert_rows(loads: ExpertLoads) -> list[dict[str, Any]]:
    """One row per layer and expert, over all steps: its share of the choices, its load, and the
    shares of its choices that are dropped and of its slots that stay empty."""
    chosen, kept = loads.chosen.sum(0), loads.kept.sum(0)
    share = _over(chosen, chosen.sum(1, keepdims=True))
    dropped, slots = _over(chosen - kept, chosen), (loads.slots or 0) * len(loads.steps)
    return [
        {
            "layer": int(layer),
            "expert": expert,
            "share": float(share[place, expert]),
            "load": float(share[place, expert] * chosen.shape[1]),
            "dropped": float(dropped[place, expert]),
            "empty": 1 - int(kept[place, expert]) / slots if slots else None,
        }
        for place, layer in enumerate(loads.layers.tolist())
        for expert in range(chosen.shape[1])
    ]


def exchange_rows(calls: CallInstances, timed: bool = True) -> list[dict[str, Any]]:
    """Dispatch and combine by axis and phase: calls, bytes, and where ranks have one time seconds
    blocked = wait + transfer, a rank and step.

    In a forward pass a layer's first exchange is its dispatch, in a backward pass its combine.
    """
    events, place = calls.trace.events, _exchanges(calls)
    row = calls.row[place]
    axis, phase = (event_values(calls.trace, key, row) for key in ("axis", "phase"))
    backward = labelled(events, "phase", _BACKWARD)[row]
    kinds, kind = combinations([axis, phase, (_turn(events, row) + backward) % 2])
    per = 1 / len(calls.trace.steps)
    columns = {"calls": np.ones(len(row)), "bytes": events["bytes"][row]}
    if timed:
        blocked, wait = (getattr(calls, name)[place] * 1e-9 for name in ("blocked", "wait"))
        columns |= {"blocked_s": blocked, "wait_s": wait, "transfer_s": blocked - wait}
    sums = {name: np.bincount(kind, each, len(kinds)) * per for name, each in columns.items()}
    values = zip(*(each.tolist() for each in sums.values()))
    what = named(calls.trace, ("axis", "phase"), kinds[:, :2])
    part = ("dispatch", "combine")
    return [
        {**names, "what": part[turn], **dict(zip(sums, each))}
        for names, turn, each in zip(what, kinds[:, 2].tolist(), values)
    ]


def _exchanges(calls):
    """The places in `calls` of the ends of exchanges along e, inside of steps."""
    events, row = calls.trace.events, calls.row
    along = np.array([group.axis == EXPERTS for group in calls.trace.groups], bool)
    here = calls.inside & calls.ending & labelled(events, "op", ["all_to_all"])[row]
    return np.flatnonzero(here)[along[events["group"][row[here]]]]


def _turn(events, row):
    """0 for the first exchange of a layer in a pass, 1 for the second one."""
    _, which = combinations([events[key][row] for key in _PASS])
    order = np.lexsort((events["seq"][row], which))
    first = np.flatnonzero(np.diff(which[order], prepend=-1))
    turn = np.empty(len(row), int)
    turn[order] = np.arange(len(row)) - np.repeat(first, np.diff([*first, len(row)]))
    return turn % 2


def cost_row(
    trace: Steady, loads: ExpertLoads, calls: CallInstances | None = None
) -> dict[str, Any]:
    """What the imbalance of experts cost in the mean step of `loads`.

    `dropped` is a share of the choices, `empty` one of the slots, and `dropped_even` and
    `empty_even` what they were if all experts had the same; `empty_flop` is what the products of
    empty slots are forward and backward, without what runs again.  `wait_s` is what a
    mean rank waits in exchanges along e, and `rank` whom ranks wait for longest there, with its
    `experts` and their `load`, the tokens in their slots over those of the mean expert; these are
    None without `calls`, and where nothing is exchanged.
    """
    chosen, kept = int(loads.chosen.sum()), int(loads.kept.sum())
    return {
        "slots": loads.slots,
        "highest": float(loads.load.max(2).mean()),
        "dropped": (chosen - kept) / max(1, chosen),
        **_of_slots(trace, loads, chosen, kept),
        **_waits(trace, loads, calls),
    }


def _of_slots(trace, loads, chosen, kept):
    """What the number of slots tells, None where it is not known."""
    if not loads.slots:
        return dict.fromkeys(("dropped_even", "empty", "empty_even", "empty_flop"))
    slots, model = loads.slots * loads.chosen.size, configuration(trace).model
    matrices = expert_weights(model) / np.prod(loads.chosen.shape[1:])  # of one expert
    return {
        "dropped_even": max(0.0, 1 - slots / chosen),
        "empty": 1 - kept / slots,
        "empty_even": max(0.0, 1 - chosen / slots),
        "empty_flop": float(6 * (slots - kept) / len(loads.steps) * matrices),
    }


def _waits(trace, loads, calls):
    """What a mean rank waits in exchanges along e, and for whom."""
    place = _exchanges(calls) if calls else np.zeros(0, int)
    if not len(place):
        return dict.fromkeys(("wait_s", "wait_share", "rank", "experts", "load"))
    wait, ranks = calls.wait[place] * 1e-9, trace.attrs["world_size"]
    total, steps = wait.sum(), step_seconds(trace).sum()
    rank = int(np.bincount(calls.by[place], wait, ranks).argmax())
    return {
        "wait_s": float(total / len(trace.steps)),
        "wait_share": float(total / steps) if steps else None,
        "rank": rank,
        **_held(trace, loads, rank),
    }


def _held(trace, loads, rank):
    """The experts of each layer that a rank has, and the tokens in their slots over those of the
    mean expert."""
    at = trace.attrs["axes"].split().index(EXPERTS)
    count = loads.chosen.shape[2]
    here = count // trace.attrs["axis_sizes"][at]
    first = int(trace.ranks["coords"][rank, at]) * here
    kept = loads.kept.sum((0, 1))
    last = first + here - 1
    return {
        "experts": f"{first} to {last}" if here > 1 else f"{first}",
        "load": float(_over(kept[first : last + 1].mean(), kept.mean())),
    }
