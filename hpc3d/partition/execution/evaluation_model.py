"""Capture a module in evaluation mode, for the pipeline stages of its training.

In evaluation mode, dropout, BatchNorm and Python code that reads `self.training` compute different
operations. The module is therefore captured a second time. Each operation is assigned to the chunk
of the corresponding operation in training, if possible. A chunk must hold the weights that its
operations read, and must not need results of later chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import networkx as nx
from torch import fx

from hpc3d.console.sanitize import counted
from hpc3d.partition.capture import (
    Captured,
    captured_by_sample,
    is_trained,
    loss_of,
    state_of,
    updated_by_microbatches,
)
from hpc3d.partition.capturing.flat_export import module_of, where
from hpc3d.partition.capturing.user_module import in_evaluation
from hpc3d.partition.execution.stage_program import stage_programs
from hpc3d.partition.execution.staged_model import StagedModel
from hpc3d.partition.factory import made_model, made_with_data

_Parts = Sequence[Sequence[int]]


def evaluation_model(
    name: str, model: StagedModel, parts: _Parts, dtype: str | None = None
) -> StagedModel:
    """Return the chunks of a module in evaluation mode, given those in training.

    `name` is the factory of the module, which is converted to `dtype` unless it is `None`, and
    `parts` contains the indices of the pieces of each chunk of `model`. Raises ValueError if the
    module cannot be evaluated on these stages.
    """
    module, inputs, reduction = made_model(name, dtype)

    def with_data():
        module, inputs = made_with_data(name, 0, dtype)
        module.eval()
        return module, inputs

    try:
        with in_evaluation(module):
            captured = captured_by_sample(module, inputs, with_data, reduction)
        return staged_evaluation(captured, model, parts)
    except ValueError as error:
        raise ValueError(f"train.eval_every: in evaluation mode, {error}") from error


def staged_evaluation(captured: Captured, model: StagedModel, parts: _Parts) -> StagedModel:
    """Split a module `captured` in evaluation mode into the model chunks used in training."""
    if loss_of(captured) is None:
        raise ValueError(captured.loss.text)
    captured = captured._replace(changing=_changing(model))
    programs = stage_programs(captured, _evaluated_parts(captured, model, parts), ways=model.ways)
    _refuse_other_splits(programs, model)
    loss, nothing = loss_of(captured), frozenset[fx.Node]()
    recompute = (False,) * len(parts)
    return StagedModel(captured, programs, model.replicas, recompute, nothing, loss, model.owners)


def _refuse_other_splits(programs, model):
    """Raise ValueError if a weight is split differently in evaluation and in training."""
    for program in programs if model.ways > 1 else ():
        for name in program.weights:
            if program.sharding.weights.get(name) != model.splits.get(name):
                raise ValueError(
                    f"{name} is split differently over the {model.ways} tensor-parallel ranks "
                    "than in training; make a plan with --tensor 1"
                )


def evaluation_lines(evaluated: StagedModel, model: StagedModel) -> Iterator[str]:
    """Yield log lines that describe the loss, and its differences from training and from torch.

    The lines name the loss, the trained parameters that it does not read, and the buffers that it
    reads and that torch updates less often.
    """
    yield f"evaluation loss: {evaluated.captured.loss.text}"
    read = {name for program in evaluated.programs for name in program.weights}
    trained = [name for name, each in state_of(model.captured).items() if is_trained(each)]
    if unread := [name for name in trained if name not in read]:
        more = f" and {counted(len(unread) - 1, 'more parameter')}" if unread[1:] else ""
        yield f"evaluation does not use {unread[0]}{more}"
    known = updated_by_microbatches(model.captured)
    for name in updated_by_microbatches(model.captured, read):
        if name not in known:
            yield (
                f"buffer {name}: updated by each microbatch, not once per step as in torch, and "
                "read by the evaluation"
            )


def trained_names(captured: Captured, model: StagedModel) -> dict[str, str]:
    """Return a dict from the names of weights in evaluation to their names in training.

    Parameters and buffers have the same names. Other tensors correspond if they are stored in the
    same attribute of the module.
    """
    names = {path: name for name, path in model.captured.attributes.items()}
    held = {name for name in captured.weights.values() if name in captured.program.state_dict}
    return {name: name for name in held} | {
        name: names[path] for name, path in captured.attributes.items() if path in names
    }


def read_in_training(model: StagedModel) -> set[str]:
    """Return the names of the weights that the training step reads.

    All other parameters and buffers are constant during the run, so any stage may read them in an
    evaluation.
    """
    return {name for program in model.programs for name in program.weights}


def _changing(model):
    """Return the names of the weights that a training step changes."""
    written = {name for program in model.programs for name in program.written}
    return written | {name for name, like in state_of(model.captured).items() if is_trained(like)}


def _evaluated_parts(captured, model, parts):
    """Return the indices of the pieces of each chunk in evaluation mode.

    The pieces of a group are in the same chunk. In reverse order, `latest` is the last chunk that
    holds the weights of a group and is not after a reader. In program order, a group is assigned
    to the chunk next to its chunk in training, between its operands and `latest`.
    """
    wanted = _chunks_in_training(captured, model, parts)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(captured.pieces)))
    for node, readers in captured.readers.items():
        graph.add_edges_from((captured.piece_of[node], reader) for reader in readers)
    groups = nx.condensation(graph)
    members = {group: sorted(groups.nodes[group]["members"]) for group in groups}
    order = [*nx.lexicographical_topological_sort(groups, key=members.get)]
    holding = {group: _holding(captured, model, members[group]) for group in order}
    latest, found = {}, {}
    for group in reversed(order):
        bound = min((latest[each] for each in groups.successors(group)), default=len(parts) - 1)
        allowed = [chunk for chunk in holding[group] if chunk <= bound]
        if not allowed:
            _refuse(captured, model, members[group])
        latest[group] = max(allowed)
    for group in order:
        first = max((found[each] for each in groups.predecessors(group)), default=0)
        goal = max(wanted.get(piece, first) for piece in members[group])
        allowed = [chunk for chunk in holding[group] if first <= chunk <= latest[group]]
        found[group] = min(allowed, key=lambda chunk: abs(chunk - goal))
    chunks = [(found[group], piece) for group in order for piece in members[group]]
    return [sorted(piece for at, piece in chunks if at == chunk) for chunk in range(len(parts))]


def _chunks_in_training(captured, model, parts):
    """Return a dict from a piece to the chunk of the corresponding operations in training."""
    chunk_of = {piece: chunk for chunk, part in enumerate(parts) for piece in part}
    pieces = model.captured.piece_of
    known = {key: chunk_of[pieces[node]] for key, node in _operations(model.captured)}
    found: dict[int, int] = {}
    for key, node in _operations(captured):
        if key in known:
            piece = captured.piece_of[node]
            found[piece] = max(known[key], found.get(piece, 0))
    return found


def _operations(captured):
    """Yield each operation with its key: submodule, function, and number of the call."""
    calls: Counter = Counter()
    for node in captured.program.graph.nodes:
        if node in captured.piece_of:
            name = module_of(node), str(node.target)
            calls[name] += 1
            yield (*name, calls[name]), node


def _holding(captured, model, pieces):
    """Return the chunks on stages that hold the weights of some pieces.

    Constants do not matter, because every stage can hold them.
    """
    count, width = len(model.programs), len(model.replicas)
    stages = {*range(width)}
    for _, name in _placed(captured, model, pieces):
        stages &= {*model.owners[name]}
    last = captured.piece_of[loss_of(captured)] in pieces
    return [chunk for chunk in range((count - 1) * last, count) if chunk % width in stages]


def _placed(captured, model, pieces):
    """Yield (operation, name in training) for each non-constant weight that the pieces read."""
    known, read = trained_names(captured, model), read_in_training(model)
    for piece in map(captured.pieces.__getitem__, pieces):
        for node in (*piece.nodes, *piece.copies):
            for name in (captured.weights.get(each) for each in node.all_input_nodes):
                stored = name in captured.program.state_dict and name in read
                if stored or known.get(name) in captured.changing:
                    yield node, known[name]


def _refuse(captured, model, pieces):
    node, name = next(_placed(captured, model, pieces))
    raise ValueError(
        f"{node.name}{where(node)} reads {name} on a different pipeline stage than in training; "
        "make a plan with one stage, or read the weights in the same order as in training"
    )
