"""Primitives: functions on the arrays of one rank, each with a rule for every kind of array.

    @primitive
    def gelu_tanh(h, out): ...              NumPy
    @gelu_tanh.abstract
    def _(h, out): ...                      what comes out, for arrays without data
    @gelu_tanh.cuda
    def _(gpu, h, out): ...                 the CUDA kernels and products that it is
    @gelu_tanh.narrow
    def _(h, out): ...                      NumPy on 16-bit floats (hpc3d.arrays.narrow)

The type of the first argument chooses the rule.  They stand side by side, as in JAX, where a
primitive is an implementation, an abstract evaluation and a lowering.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

# A rule takes what its primitive takes; that of CUDA takes a `Gpu` (hpc3d.cuda.gpu) before it.
_Rule = Callable[..., Any]
BACKENDS: dict[type, Callable[[Primitive], _Rule | None]] = {}  # the rule for arrays of a type
PRIMITIVES: list[Primitive] = []


class Primitive:
    """A function with a rule per kind of array; called with anything else it is `numpy` itself.

    `abstract_rule`, `cuda_rule` and `narrow_rule` are None for a primitive that lacks them.
    """

    def __init__(self, numpy: _Rule, abstract_rule: _Rule | None = None) -> None:
        self.numpy, self.abstract_rule = numpy, abstract_rule
        self.cuda_rule: _Rule | None = None
        self.narrow_rule: _Rule | None = None
        self.registered: dict[type, _Rule] = {}
        self.chosen: dict[type, _Rule] = {}
        update_wrapper(self, numpy)
        PRIMITIVES.append(self)

    def __call__(self, first: Any, *rest: Any, **named: Any) -> Any:
        rule = self.chosen.get(type(first)) or self._choose(type(first))
        return rule(first, *rest, **named)

    def _choose(self, kind: type) -> _Rule:
        """The rule for arrays of a type, from now on."""
        backend = BACKENDS.get(kind)
        rule = self.registered.get(kind) or (backend and backend(self)) or self.numpy
        return self.chosen.setdefault(kind, rule)

    def abstract(self, rule: _Rule) -> _Rule:
        self.abstract_rule = rule
        return rule

    def cuda(self, rule: _Rule) -> _Rule:
        self.cuda_rule = rule
        return rule

    def narrow(self, rule: _Rule) -> _Rule:
        self.narrow_rule = rule
        return rule

    def register(self, kind: type, rule: _Rule) -> None:
        """Let arrays of a type take a rule of their own."""
        self.registered[kind] = rule
        self.chosen.pop(kind, None)


primitive = Primitive


def composite(function: _Rule) -> Primitive:
    """A primitive whose body consists of what arrays without data do by themselves, and so is its
    abstract rule as well."""
    return Primitive(function, function)


def add_backend(kind: type, rule_of: Callable[[Primitive], _Rule | None]) -> None:
    """Let arrays of a type take `rule_of(primitive)`, instead of what they took before."""
    BACKENDS[kind] = rule_of
    for each in PRIMITIVES:
        each.chosen.pop(kind, None)
