"""Every operation has a rule for each array type."""

import ast
import importlib
import inspect
import pkgutil

import pytest

import hpc3d.ops
from hpc3d.arrays import primitive
from hpc3d.cuda import launch_table

for module in pkgutil.iter_modules(hpc3d.ops.__path__, "hpc3d.ops."):
    importlib.import_module(module.name)
OPS = [each for each in primitive.PRIMITIVES if each.__module__.startswith("hpc3d.ops.")]

# What only GPUs do is asked of no other array.
ON_DEVICES_ONLY = {"accumulate_product", "multiply_coded"}


def lacks(ops):
    """Return {op: its missing rules}."""
    found = {}
    for each in ops:
        missing = {
            kind
            for kind, rule in [("abstract", each.abstract_rule), ("CUDA", each.cuda_rule)]
            if rule is None
        }
        if missing:
            found[each.__name__] = missing
    return found


def test_every_operation_has_all_rules():
    assert len(OPS) > 20
    assert lacks(OPS) == {name: {"abstract"} for name in ON_DEVICES_ONLY}


def test_operation_without_a_rule_is_detected(monkeypatch):
    monkeypatch.setattr(primitive, "PRIMITIVES", [])

    @primitive.primitive
    def odd(x):
        return x

    assert lacks([odd]) == {"odd": {"abstract", "CUDA"}}
    odd.abstract(lambda x: x)
    assert lacks([odd]) == {"odd": {"CUDA"}}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_rules_accept_the_arguments_of_their_operation(op):
    names = list(inspect.signature(op.numpy).parameters)
    for rule, skipped in ((op.abstract_rule, 0), (op.cuda_rule, 1)):
        if rule is None:
            continue
        taken = inspect.signature(rule).parameters.values()
        if any(each.kind is each.VAR_POSITIONAL for each in taken):
            continue
        assert len(taken) - skipped >= len(names)


def test_cuda_rules_launch_existing_kernels():
    launched = set()
    for module in pkgutil.iter_modules(hpc3d.ops.__path__, "hpc3d.ops."):
        tree = ast.parse(inspect.getsource(importlib.import_module(module.name)))
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "gpu.launch":
                launched.add(ast.literal_eval(call.args[0]))
    assert len(launched) > 20
    assert launched <= launch_table.kernels().keys()
