"""Primitives: array functions without communication, each with one rule per array type.

A rule is the implementation of a primitive for one type of array:

    @primitive
    def gelu_tanh(h, out): ...              NumPy
    @gelu_tanh.abstract
    def _(h, out): ...                      the result as an abstract array
    @gelu_tanh.cuda
    def _(gpu, h, out): ...                 CUDA kernels and matrix products
    @gelu_tanh.narrow
    def _(h, out): ...                      NumPy on 16-bit floats (hpc3d.arrays.narrow)
    gelu_tanh.states("mn mn")               dimensions of the arrays, to check layouts (`states`)

The type of the first argument selects the rule.  All rules are defined together, as in JAX,
where a primitive has an implementation, an abstract evaluation and a lowering.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import numpy as np

# A rule takes the same arguments as its primitive; a CUDA rule takes a `Gpu` as an additional
# first argument.
_Rule = Callable[..., Any]
BACKENDS: dict[type, Callable[[Primitive], _Rule | None]] = {}  # rules by array type
PRIMITIVES: list[Primitive] = []


class Primitive:
    """Function with one implementation (rule) per array type; `numpy` is the default.

    `abstract_rule`, `cuda_rule` and `narrow_rule` are `None` if no such rule is defined.
    """

    def __init__(self, numpy: _Rule, abstract_rule: _Rule | None = None) -> None:
        self.numpy, self.abstract_rule = numpy, abstract_rule
        self.cuda_rule: _Rule | None = None
        self.narrow_rule: _Rule | None = None
        self.notation = "", "", True  # the arguments of `states`
        self.registered: dict[type, _Rule] = {}
        self.chosen: dict[type, _Rule] = {}
        update_wrapper(self, numpy)
        PRIMITIVES.append(self)

    def __call__(self, first: Any, *rest: Any, **named: Any) -> Any:
        rule = self.chosen.get(type(first)) or self._choose(type(first))
        return rule(first, *rest, **named)

    def _choose(self, kind: type) -> _Rule:
        backend = BACKENDS.get(kind)
        rule = self.registered.get(kind) or (backend and backend(self)) or self.numpy
        return self.chosen.setdefault(kind, rule)

    def abstract(self, rule: _Rule) -> _Rule:
        self.abstract_rule = rule
        return rule

    def states(self, notation: str = "", linear: str = "", sums: bool = True) -> None:
        """State the dimensions of operands and results, for hpc3d.predict.proof.

        Parameters
        ----------
        notation
            Index notation of the array arguments, in order, and of the results, such as
            "mn n -> m". The default describes an elementwise or row-wise function. The symbol "?"
            stands for an array whose dimensions are not tracked, and "." for such a dimension.
        linear
            "sum" or "product" if the primitive may be applied to the terms of a sum that other
            ranks compute.
        sums
            False if dimensions that are missing in a result are not summed, but, for example,
            maximized.
        """
        self.notation = notation, linear, sums

    def cuda(self, rule: _Rule) -> _Rule:
        self.cuda_rule = rule
        return rule

    def threads(self, rule: _Rule) -> _Rule:
        """Use `rule` for NumPy arrays, but not for 16-bit floats or abstract arrays.

        A composite primitive needs such a rule to compute blocks on all threads.
        """
        self.register(np.ndarray, rule)
        return rule

    def cuda_as_numpy(self) -> None:
        """Use the NumPy implementation as the CUDA rule: its operations accept GPU arrays."""
        self.cuda_rule = lambda gpu, *operands, **named: self.numpy(*operands, **named)

    def narrow(self, rule: _Rule) -> _Rule:
        self.narrow_rule = rule
        return rule

    def register(self, kind: type, rule: _Rule) -> None:
        """Register an implementation for arrays of type `kind`."""
        self.registered[kind] = rule
        self.chosen.pop(kind, None)


primitive = Primitive


def composite(function: _Rule) -> Primitive:
    """Return a primitive with a single implementation that works for all array types.

    The implementation only calls operations that all array types support, so abstract arrays need
    no separate implementation.
    """
    return Primitive(function, function)


def add_backend(kind: type, rule_of: Callable[[Primitive], _Rule | None]) -> None:
    """Register a backend; `rule_of` returns a primitive's implementation for type `kind`."""
    BACKENDS[kind] = rule_of
    for each in PRIMITIVES:
        each.chosen.pop(kind, None)
