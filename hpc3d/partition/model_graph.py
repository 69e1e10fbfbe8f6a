"""The graph of a captured module with its costs, as hpc3d.partition.planner cuts it.

A stage holds, for every parameter, its value, its gradient and what the optimiser keeps; for every
microbatch in flight, what backward needs.
"""

from __future__ import annotations

import torch

from hpc3d.partition.atom_graph import Atom, Graph, Value, contracted
from hpc3d.partition.capture import carries_batch
from hpc3d.partition.operation_costs import OperationCost, Operations
from hpc3d.predict.machine.machine import Machine

_ADAMW = 2  # arrays of a parameter's size that the optimiser keeps


def graph_of(operations: Operations, machine: Machine, batch: int) -> Graph:
    """The Graph of a module for microbatches of `batch` samples; an atom's id is its module and
    its first operation."""
    captured, found = operations.captured, operations.costs(machine, batch)
    atoms = [_atom(captured, piece, found) for piece in captured.pieces]
    values = [
        Value(captured.places[node], readers, found[node].nbytes)
        for node, readers in captured.readers.items()
    ]
    return contracted(atoms, values)


def _atom(captured, piece, found):
    parts = [found.get(node, OperationCost()) for node in (*piece.copies, *piece.nodes)]
    state = {**captured.program.state_dict, **captured.program.constants}
    trained, fixed = 0, 0
    for name in piece.weights:
        tensor = state[name]
        nbytes = tensor.numel() * tensor.element_size()
        if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
            trained += nbytes
        else:
            fixed += nbytes
    return Atom(
        (_name_of(piece),),
        sum(part.forward for part in parts),
        sum(part.backward for part in parts),
        (2 + _ADAMW) * trained + fixed,
        sum(part.saved for part in parts),
        trained,
    )


def _name_of(piece):
    """The module of a piece and its first operation on the batch."""
    first = next(filter(carries_batch, piece.nodes), piece.nodes[0]).name
    return f"{piece.module}/{first}" if piece.module else first
