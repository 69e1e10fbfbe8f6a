"""Convert a captured module to a graph of atoms with costs.

An atom consists of operations that a partition always assigns to the same stage.

A stage stores the value, the gradient and the optimizer state of each of its parameters, and the
saved activations of every microbatch in flight.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from math import prod

from hpc3d.partition.atom_graph import Atom, Graph, Shared, Value, contracted
from hpc3d.partition.capture import (
    Captured,
    carries_batch,
    gradient_bytes,
    is_trained,
    loss_of,
    memory_of,
    shape_of,
    state_of,
    written_memory,
)
from hpc3d.partition.capturing.flat_export import where
from hpc3d.partition.capturing.opaque_modules import OpaqueModule
from hpc3d.partition.evaluation import MOMENTS, ModelCosts, RunCosts
from hpc3d.partition.operation_costs import OperationCost, Operations
from hpc3d.predict.machine.machine import Machine


def costs_of(
    operations: Operations,
    machine: Machine,
    batch: int | None = None,
    moments: int = MOMENTS,
) -> ModelCosts:
    """Return the costs of running a captured module on a machine.

    `batch` is the number of samples per step (None: the batch of the example inputs), and
    `moments` is as in ModelCosts.
    """
    captured, run = operations.captured, RunCosts(**operations.run)
    graphs = partial(graph_of, operations, machine, moments=moments)
    return ModelCosts(graphs, machine, batch or captured.batch, run, _states(captured, moments))


def graph_of(
    operations: Operations, machine: Machine, batch: int, moments: int = MOMENTS
) -> Graph:
    """Return the graph of a module, with costs for microbatches of `batch` samples.

    The memory of a parameter includes `moments` optimizer moments.
    """
    captured, found = operations.captured, operations.costs(machine, batch)
    weights, reads = _weights(captured, moments), [*_read_inputs(captured)]
    atoms = [
        _atom(number, piece, found, [weights[name] for name in piece.weights])
        for number, piece in enumerate(captured.pieces)
    ]
    for pieces, nbytes in reads:
        for number in pieces:
            atoms[number] = atoms[number]._replace(fed=atoms[number].fed + nbytes)
    values = [
        Value(captured.piece_of[node], readers, found[node].nbytes)
        for node, readers in captured.readers.items()
    ]
    values += [*_saved_later(operations, found), *_before_loss(captured)]
    shared = _shared(captured, weights)
    shared += [Shared((*pieces,), 0.0, 0.0, nbytes) for pieces, nbytes in reads if len(pieces) > 1]
    return contracted(atoms, values, operations.together, shared)


def largest_atom(captured: Captured, graph: Graph) -> tuple[float, str]:
    """Return the largest atom's share of the compute time, and why the atom is indivisible."""
    seconds = [atom.forward + atom.backward for atom in graph.atoms]
    most = max(range(len(graph)), key=seconds.__getitem__)
    atom = graph.atoms[most]
    nodes = [node for piece in atom.pieces for node in captured.pieces[piece].nodes]
    without = [node for node in nodes if not carries_batch(node)]
    if len(nodes) == 1 and isinstance(nodes[0].target, OpaqueModule):
        why = "torch.export cannot trace it"
    elif len(nodes) == 1:
        why = "it is a single operation"
    elif buffer := _modified_buffer(captured, nodes):
        why = buffer
    elif without:
        why = f"{without[0].name} has no batch in dimension 0{where(without[0])}"
    else:
        why = "its operations use the same memory"
    return seconds[most] / sum(seconds), f"{atom.ids[0]} cannot be split, because {why}"


def _modified_buffer(captured, nodes):
    """Describe a modified buffer that at least two of the operations `nodes` use, or return "".

    A buffer is ignored if all operations that use it modify it.
    """
    written = {number: node for node in nodes for number in written_memory(node)}
    for buffer, name in captured.weights.items():
        for number in written.keys() & memory_of(buffer):
            users = [
                node
                for node in nodes
                if any(number in memory_of(each) for each in node.all_input_nodes)
            ]
            if users[1:] and not all(number in memory_of(node) for node in users):
                writer = written[number]
                return (
                    f"{len(users)} of its operations use the buffer {name}, which {writer.name} "
                    f"modifies{where(writer)}"
                )
    return ""


def _saved_later(operations, found):
    """Yield a zero-byte Value for each result that a later piece saves for the backward pass.

    A result is skipped if the first operation that saves it is in the same piece.
    """
    piece_of = operations.captured.piece_of
    for node, saver in operations.savers.items():
        if node in piece_of and piece_of.get(saver, piece_of[node]) != piece_of[node]:
            yield Value(piece_of[node], (piece_of[saver],), 0.0, found[node].later)


def _before_loss(captured):
    """Return a zero-byte edge to the loss from each other sink of the graph.

    The edges make the loss the last atom in every topological order.
    """
    loss = loss_of(captured)
    if loss is None:
        return []
    last, pieces = captured.piece_of[loss], range(len(captured.pieces))
    read = {captured.piece_of[node] for node in captured.readers}
    return [Value(piece, (last,), 0.0) for piece in pieces if piece != last and piece not in read]


def _weights(captured, moments):
    """Return a dict from weight name to (bytes stored on a stage, bytes of the gradient).

    The stored bytes of a trainable parameter include its gradient and its optimizer states.
    """
    found, states = {}, _states(captured, moments)
    for name, tensor in state_of(captured).items():
        nbytes = tensor.numel() * tensor.element_size()
        gradient = gradient_bytes(tensor) if is_trained(tensor) else 0
        found[name] = (nbytes + (1 + states) * gradient, gradient)
    return found


def _states(captured, moments):
    """Return the number of optimizer state arrays in memory: moments and any master weights.

    The result is 0 if `moments` is 0, because the master weights are offloaded with the moments.
    """
    trained = filter(is_trained, state_of(captured).values())
    return moments and moments + any(gradient_bytes(each) > each.nbytes for each in trained)


def _shared(captured, weights):
    readers = defaultdict(list)
    for number, piece in enumerate(captured.pieces):
        for name in piece.weights:
            readers[name].append(number)
    return [
        Shared(tuple(pieces), *weights[name])
        for name, pieces in readers.items()
        if len(pieces) > 1
    ]


def _read_inputs(captured):
    """Yield (pieces, bytes per sample) for each model input with a batch dimension.

    The pieces are those that read the input.
    """
    for node in captured.inputs:
        tensor, readers = node.meta["val"], {captured.piece_of.get(user) for user in node.users}
        if carries_batch(node):
            yield sorted(readers - {None}), prod(shape_of(tensor, 1)) * tensor.element_size()


def _atom(number, piece, found, weights):
    """Convert a piece to an atom.

    The atom is named after the piece's module and the piece's first operation whose result has a
    batch dimension.
    """
    costs = [found.get(node, OperationCost()) for node in (*piece.copies, *piece.nodes)]
    first = next(filter(carries_batch, piece.nodes), piece.nodes[0]).name
    return Atom(
        ids=(f"{piece.module}/{first}" if piece.module else first,),
        forward=sum(cost.forward for cost in costs),
        backward=sum(cost.backward for cost in costs),
        memory=sum(memory for memory, _ in weights),
        saved=sum(cost.saved for cost in costs),
        parameters=sum(trained for _, trained in weights),
        weight=sum(cost.weight for cost in costs),
        working=max(cost.working for cost in costs),
        pieces=(number,),
    )
