"""Trace a module with torch.export on fake tensors, with a symbolic batch size in dimension 0.

The module is traced until all submodules that torch.export cannot trace are opaque operations.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from hpc3d.partition.capturing.flat_export import flat_export
from hpc3d.partition.capturing.named_outputs import NamedOutputs
from hpc3d.partition.capturing.opaque_modules import OpaqueModules, culprit
from hpc3d.partition.capturing.python_state import ChangingState, StateWatch
from hpc3d.partition.capturing.refusals import (
    UntraceableOperation,
    explained,
    refuse_dependence_on_data,
)
from hpc3d.partition.capturing.sample_layout import SampleLayouts
from hpc3d.partition.capturing.sample_relations import BatchValues, refuse_related_samples
from hpc3d.partition.capturing.user_code import (
    UnsupportedCode,
    described,
    emptied,
    random_states,
    tensors,
    undisturbed,
    without_data,
)
from hpc3d.partition.capturing.user_module import attribute_tensors
from hpc3d.runtime import host_memory

MEMORY_FRACTION = 0.5  # largest size of the parameters, as a fraction of the host memory
WithData = Callable[[], tuple[torch.nn.Module, tuple | dict]]


class TracedModule(NamedTuple):
    """Program of a module.

    `model` is the copy of the module that was traced, and `outputs` describes its results.
    """

    program: ExportedProgram
    model: torch.nn.Module
    outputs: NamedOutputs


def traced(
    module: torch.nn.Module,
    inputs: tuple | dict,
    with_data: WithData | None,
    unsplit: Collection[int],
) -> TracedModule:
    """Trace a module, and convert each submodule that cannot be traced to an opaque operation.

    The arguments are those of `hpc3d.partition.capture.capture`. Raises ValueError with the user's
    file and line if the module cannot be traced.
    """
    batch = batch_of(inputs)
    carrying = [each for each in _carrying(inputs, batch) if each not in unsplit]
    opaque = OpaqueModules(partial(_example, module, inputs, carrying, with_data), batch)
    while True:
        model = module
        try:
            with undisturbed():
                model, like = emptied_copies(module, inputs)
                opaque.stand_in(model)
                outputs = _named_outputs(model, like)
                watch, generators = StateWatch(model), random_states()
                program = _program(model, like, carrying)
                _refuse_random_numbers(generators.advanced())
            break
        except (Exception, SystemExit) as error:
            path = error.path if isinstance(error, UntraceableOperation) else culprit(error, model)
            try:
                why = explained(error, model, path)
                if isinstance(error, UnsupportedCode):
                    raise ValueError(why) from error
                opaque.add(model, path, why)
            except ValueError as refused:
                raise ValueError(f"this model cannot be captured: {refused}") from error
    if watch.changed:
        _refuse_changing_state(module, inputs, opaque, carrying)
    return TracedModule(program, model, outputs)


def independent_inputs(module: torch.nn.Module, inputs: tuple | dict) -> list[int]:
    """Return the indices of inputs whose number of rows may differ from the batch size."""
    first, *others = _carrying(inputs, batch_of(inputs))
    if not others:
        return []
    try:
        with undisturbed():
            model, like = emptied_copies(module, inputs)
            _named_outputs(model, like)
            sizes = {first: {0: Dim("batch", min=2)}, **{each: {0: Dim.AUTO} for each in others}}
            program = flat_export(model, like, _dynamic_shapes(model, like, sizes))
    except (Exception, SystemExit):
        return []
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    found = [
        node.meta["val"]
        for node in program.graph.nodes
        if node.op == "placeholder" and kinds[node.name] is InputKind.USER_INPUT
    ]
    if isinstance(like, dict):
        names = program.call_spec.in_spec.child(1).context
        positions = {id(each): at for at, each in enumerate(tree_leaves([like[n] for n in names]))}
        found = [found[positions[id(leaf)]] for leaf in tree_leaves(like)]
    return [each for each in others if str(found[each].shape[0]) != str(found[first].shape[0])]


def inputs_with_later_batch(module: torch.nn.Module, inputs: tuple | dict) -> list[str]:
    """Return the names of the inputs whose dimension 1 may be the batch.

    The list is empty if the module cannot be traced with this batch, or combines samples.
    """
    leaves = tree_leaves(inputs)
    first = next(each for each in tensors(inputs) if each.dim())
    rows, sizes = Dim("batch", min=2), {}
    for index, leaf in enumerate(leaves if first.dim() > 1 else ()):
        shape = leaf.shape if isinstance(leaf, torch.Tensor) else ()
        later = len(shape) > 1 and shape[1] == first.shape[1]
        if later or (shape and shape[0] == first.shape[1]):
            sizes[index] = {int(later): rows}
    try:
        with undisturbed():
            model, like = emptied_copies(module, inputs)
            _named_outputs(model, like)
            program = flat_export(model, like, _dynamic_shapes(model, like, sizes))
        refuse_related_samples(BatchValues(program, None), SampleLayouts(program.graph))
    except (Exception, SystemExit):
        return []
    leaves = tree_leaves(like)
    later = {id(leaves[index]) for index, dims in sizes.items() if 1 in dims}
    given = _arguments(model, like)
    return [name for name in given if later & {*map(id, tree_leaves(given[name]))}]


def batch_of(inputs: tuple | dict) -> int:
    """Return the size of the first input in dimension 0; raise ValueError if it is less than 2."""
    for leaf in tensors(inputs):
        if leaf.dim():
            if leaf.shape[0] < 2:
                raise ValueError(
                    "the example inputs must have a batch size (dimension 0) of at least 2"
                )
            return leaf.shape[0]
    raise ValueError("at least one example input must be a tensor with the batch in dimension 0")


def _named_outputs(model, like):
    """Make a model return a dict from name to tensor; return the description of its outputs."""
    return NamedOutputs(model, like if isinstance(like, dict) else ())


def _program(model, like, carrying):
    rows = Dim("batch", min=2)
    sizes = {each: {0: rows} for each in carrying}
    program = flat_export(model, like, _dynamic_shapes(model, like, sizes))
    refuse_dependence_on_data(program)
    return program


def _dynamic_shapes(model, like, sizes):
    """Return the argument `dynamic_shapes` of torch.export.

    `sizes` maps the index of an input to the symbolic sizes of its dimensions.
    """
    leaves = tree_leaves(like)
    rows = {id(leaves[index]): dims for index, dims in sizes.items()}
    return tree_map(lambda leaf: rows.get(id(leaf)), _arguments(model, like))


def _arguments(model, like):
    """Return the inputs by the name of the model's parameter."""
    args, kwargs = ((), like) if isinstance(like, dict) else (like, {})
    return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)


def _example(module, inputs, carrying, with_data):
    """Return the model with real tensors, and a function `run(samples)` that executes it.

    `carrying` contains the indices of the inputs with a batch dimension.
    """
    batch = batch_of(inputs)
    held = [*module.parameters(), *module.buffers(), *tensors(inputs)]
    if any(isinstance(each, FakeTensor) for each in held):
        _refuse_large(module)
        if with_data is None:
            raise ValueError(
                "a submodule cannot be traced and must be run on real data; pass `with_data`, a "
                "function that returns the model and its inputs with data"
            )
        module, inputs = with_data()
    else:
        module = copy.deepcopy(module)

    def run(samples):
        rows = torch.arange(samples) % batch
        leaves, spec = tree_flatten(inputs)
        found = [leaf[rows] if index in carrying else leaf for index, leaf in enumerate(leaves)]
        given = tree_unflatten(found, spec)
        return module(**given) if isinstance(given, dict) else module(*given)

    return module, run


def _refuse_large(module):
    needed = sum(each.numel() * each.element_size() for each in module.parameters())
    if needed > MEMORY_FRACTION * host_memory.total():
        raise ValueError(
            "a submodule cannot be traced and must be run on real data, but the parameters need "
            f"{needed / 1e9:.3g} GB, more than {MEMORY_FRACTION:.0%} of the host memory; use a "
            "machine with more memory"
        )


def _refuse_random_numbers(generators):
    """Raise UnsupportedCode if the forward pass used random number generators outside torch."""
    for name in generators:
        if name != "torch":
            raise UnsupportedCode(
                f"forward draws random numbers from {name}, which would be constant during "
                "training; draw them with torch.rand, and select with torch.where"
            )


def _refuse_changing_state(module, inputs, opaque, carrying):
    """Trace two successive calls; raise ValueError if both change the module's attributes."""
    try:
        with undisturbed():
            model, like = emptied_copies(module, inputs)
            opaque.stand_in(model, repeats=2)
            _named_outputs(model, like)
            StateWatch(model, twice=True)
            _program(model, like, carrying)
    except ChangingState:
        raise
    except Exception as error:
        raise ValueError(
            "forward changes attributes of the model, and a second call with the same inputs "
            f"raised {described(error)}; keep the attributes constant"
        ) from error


def _carrying(inputs, batch):
    """Return the indices of the flattened inputs that are tensors with `batch` rows."""
    return [
        index
        for index, leaf in enumerate(tree_leaves(inputs))
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
    ]


def emptied_copies(module: torch.nn.Module, inputs: Any) -> tuple[torch.nn.Module, Any]:
    """Return copies of a module and its inputs in which all tensors are fake tensors."""
    with without_data():
        held = [each for submodule in module.modules() for each in tensors(vars(submodule))]
        held += [each for _, each in attribute_tensors(module)]
        known = {id(each): emptied(each) for each in held}
        return copy.deepcopy(module, known), tree_map(emptied, inputs)
