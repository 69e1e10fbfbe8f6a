"""Proofs of layouts: valid layouts pass, and planted faults are found without running a step."""

import shlex
from dataclasses import replace

import numpy as np
import pytest

from hpc3d import train
from hpc3d.comm.communicator import Communicator, ready
from hpc3d.config import package_data
from hpc3d.config.input_file import GuardConfig
from hpc3d.model import gpt2, layers, loss, microbatch
from hpc3d.model.core_attention import HeadBlock
from hpc3d.model.experts import ExpertMixture
from hpc3d.model.layers import Dropout, Embedding, LayerNorm, RMSNorm
from hpc3d.model.parameters import Parameters
from hpc3d.ops.gelu import gelu_tanh
from hpc3d.pipeline.gradient_buckets import GradientBucket
from hpc3d.predict.predicted_step import predicted_step
from hpc3d.predict.proof.layout_proof import prove
from hpc3d.predict.proof.stated_mesh import StatedCommunicator
from hpc3d.predict.simulation.simulator import load_resolved
from hpc3d.tensor.layout import Layout
from hpc3d.tensor.matmul import Matmul
from tests.pipeline.mixes import LARGE, MIXES, config_of
from tests.strided import strided


def proof_of(line):
    config = config_of(line)
    prove(config, config.model.vocabulary)


@pytest.mark.parametrize("part", strided(range(12), 6, days=2))
def test_every_mix_is_proved(part):
    for line in [*MIXES, *LARGE][part::12]:
        proof_of(line)


INPUTS = package_data.file_names(package_data.INPUT)


@pytest.mark.parametrize("name", strided(INPUTS, 8))
def test_every_shipped_input_is_proved(name):
    text = INPUTS[name].read_text(encoding="utf-8")
    config = load_resolved(INPUTS[name], [], None if "\nx = " in text else 8)
    prove(config, config.model.vocabulary)


# A fault is a function of `monkeypatch`. Each one is planted in a valid mix.
SMALL = "schedule=none microbatches=2"
ONE_D = f"x=2 d=2 {SMALL} zero=1 scheme=1d dropout=0.25"
SEQUENCE = f"x=2 {SMALL} scheme=1d-sequence"
TWO_D = f"x=2 y=2 {SMALL} scheme=2d dropout=0.25"
THREE_D = f"x=2 y=2 z=2 {SMALL} scheme=3d dropout=0.25"
SHARDED = f"d=2 x=2 y=2 {SMALL} zero=3 scheme=2d"
OWNED = f"x=2 y=2 z=2 {SMALL} scheme=3d-broadcast"
PANELS = f"x=2 y=2 {SMALL} scheme=2d-summa"
LLAMA = f"y=4 z=2 {SMALL} kind=llama kv_heads=2 ffn=48"
EXPERTS = f"e=2 d=2 y=2 z=2 {SMALL} zero=0 sequence=4 experts=4 top_k=2 balance_bias=0.1"
HEADS = f"c=2 y=2 {SMALL} sequence=4 context=all-to-all dropout=0.25"
RING = f"c=2 d=2 {SMALL} zero=1 sequence=4"
GROUPS = f"d=4 shard=2 {SMALL} zero=2"
ZERO_2 = f"d=2 x=2 {SMALL} zero=2 scheme=1d"


def in_call(op, number, fault):
    """Plant a fault in call `number` of a collective, counted from 0 on each rank."""

    def plant(monkeypatch):
        real = getattr(Communicator, op)

        def call(comm, block, *arguments):
            counts = comm.pool.__dict__.setdefault("counts", {})
            counts[op] = counts.get(op, -1) + 1
            comm.real, how = real, fault if counts[op] == number else real
            return how(comm, block, *arguments)

        monkeypatch.setattr(StatedCommunicator, op, call)

    return plant


def unchanged(comm, block, *arguments):
    """Leave out a collective that does not change the shape of a block."""
    return ready(block)


def not_sent(comm, block, root):
    """Leave out a broadcast: the block has the right shape, but other values."""
    result = Communicator.broadcast(comm, block, root).wait()
    result.cell.states = block.cell.states
    return ready(result)


def own_part(comm, block, dim=0):
    """Leave out the sum of a reduce-scatter."""
    size = block.shape[dim] // comm.size
    return ready(block[(*[slice(None)] * dim, slice(0, size))])


def own_copies(comm, block, dim=0):
    """Fill a gathered block with copies of one shard."""
    return ready(np.concatenate([block] * comm.size, axis=dim))


def twice(comm, block, op="sum"):
    total = Communicator.all_reduce(comm, block, op).wait()
    return Communicator.all_reduce(comm, total, op)


def along(axis):
    """Return a fault: a collective runs along `axis` instead of another axis of the same size."""

    def wrong_axis(comm, block, *arguments):
        assert [axis] != comm.axes
        other = StatedCommunicator(comm.rank, comm.members, comm.pool, [axis])
        return comm.real(other, block, *arguments)

    return wrong_axis


def replaced(owner, name, make):
    """Replace a method by `make(real)`."""

    def plant(monkeypatch):
        monkeypatch.setattr(owner, name, make(getattr(owner, name)))

    return plant


def returning(owner, name, value):
    return replaced(owner, name, lambda real: lambda *arguments, **named: value)


def after_init(owner, change):
    """Run `change(self)` at the end of `owner.__init__`."""

    def make(real):
        def init(self, *arguments, **named):
            real(self, *arguments, **named)
            change(self)

        return init

    return replaced(owner, "__init__", make)


def declared(ending, change):
    """Change the axes along which the gradient of some parameters is declared partial."""

    def make(real):
        def add(self, name, shape, layout, partial=(), *arguments, **named):
            axes = change(tuple(partial)) if name.endswith(ending) else partial
            return real(self, name, shape, layout, axes, *arguments, **named)

        return add

    return replaced(Parameters, "add", make)


def without(axis):
    return lambda axes: tuple(each for each in axes if each != axis)


def with_axis(axis):
    return lambda axes: (*axes, axis)


def before_reduction(change):
    """Apply a function to the partial sums of Y before they are reduced."""

    def make(real):
        def reduce(self, block, layout, foreign, *arguments):
            if foreign is self.axes["k"] and foreign:
                change(block)
            return real(self, block, layout, foreign, *arguments)

        return reduce

    return replaced(Matmul, "reduce", make)


def add_one(block):
    block += np.ones(block.shape[-1])


def square(block):
    np.multiply(block, block, out=block)


def no_axes(self):
    self.axes = []


def masks(change):
    """Change the dropout mask of activations: `change(mask, mesh)`."""

    def make(real):
        return lambda self, *arguments: change(real(self, *arguments), self.mesh)

    return replaced(Dropout, "mask", make)


def first_rows(mask, mesh):
    return mask._replace(rows=range(len(mask.rows)))


def first_columns(mask, mesh):
    return mask._replace(columns=range(len(mask.columns)))


def key_of_rank(axis):
    return lambda mask, mesh: mask._replace(key=mask.key + np.uint64(mesh.coord(axis)))


def all_sums_but(place):
    """Leave out one reduction of each gradient bucket."""

    def post(self):
        self.rest = list(self.axes)
        del self.rest[place]
        self.pending = self._sum_over(self.rest[0]) if self.rest else None

    return replaced(GradientBucket, "post", lambda real: post)


COLLECTIVES = [
    # a reduction left out
    (ONE_D, "all_reduce", 0, unchanged),  # of the embeddings
    (ONE_D, "all_reduce", 1, unchanged),  # of Y
    (ONE_D, "all_reduce", 4, unchanged),
    (SEQUENCE, "reduce_scatter", 1, own_part),
    (TWO_D, "reduce_scatter", 4, own_part),
    (THREE_D, "reduce_scatter", 0, own_part),
    (THREE_D, "reduce_scatter", 12, own_part),
    (SHARDED, "reduce_scatter", 8, own_part),  # of dW
    (ZERO_2, "reduce_scatter", 2, own_part),  # of dW
    (OWNED, "reduce", 1, unchanged),
    (OWNED, "reduce", 9, unchanged),
    (PANELS, "reduce", 0, unchanged),
    (EXPERTS, "reduce_scatter", 5, own_part),
    (LLAMA, "reduce_scatter", 3, own_part),
    # a reduction twice
    (ONE_D, "all_reduce", 0, twice),
    (ONE_D, "all_reduce", 3, twice),
    (ONE_D, "all_reduce", 5, twice),
    # a gather left out
    (SEQUENCE, "all_gather", 0, own_copies),
    (TWO_D, "all_gather", 3, own_copies),
    (THREE_D, "all_gather", 7, own_copies),
    (SHARDED, "all_gather", 1, own_copies),  # of W
    (EXPERTS, "all_gather", 4, own_copies),
    (OWNED, "broadcast", 2, not_sent),
    (PANELS, "broadcast", 0, not_sent),
    (HEADS, "all_to_all", 1, unchanged),
    (EXPERTS, "all_to_all", 0, unchanged),
    (EXPERTS, "all_to_all", 1, unchanged),
    # along a wrong axis
    (THREE_D, "all_gather", 5, along("z")),
    (THREE_D, "reduce_scatter", 5, along("y")),
    (TWO_D, "reduce_scatter", 1, along("x")),
    (ONE_D, "all_reduce", 1, along("d")),
    (OWNED, "broadcast", 4, along("z")),
    (EXPERTS, "all_to_all", 0, along("d")),
    (RING, "reduce_scatter", 0, along("d")),  # of gradients, instead of along c and d
]


def title(case):
    mix, op, number, fault = case
    return f"{mix.partition(' schedule')[0]} {op} {number} {fault.__name__}"


@pytest.mark.parametrize(
    ("mix", "op", "number", "fault"), COLLECTIVES, ids=map(title, COLLECTIVES)
)
def test_faults_of_collectives_are_found(monkeypatch, mix, op, number, fault):
    proof_of(mix)
    in_call(op, number, fault)(monkeypatch)
    with pytest.raises(ValueError, match="axis"):
        proof_of(mix)


def backward_without_sums(real):
    """Compute the input gradient of a norm from the sums over a shard of the features."""

    def input_grad(self, *arguments):
        axes, self.axes = self.axes, []
        try:
            return real(self, *arguments)
        finally:
            self.axes = axes

    return input_grad


def rows_only(real):
    return lambda layout: layout[0]


def summed(comm, block, op):
    return Communicator.all_reduce(comm, block)


def activate(block):
    gelu_tanh(block, block.pool.empty(block.shape, block.dtype))


def first_heads(real):
    return lambda self: range(len(real(self)))


def first_samples(real):
    return lambda self, micro: range(len(real(self, micro)))


def rows_of_first(real):
    return lambda self, batch, *arguments: batch[: len(real(self, batch, *arguments))]


def targets_of_first(real):
    return lambda self, micro: np.zeros_like(real(self, micro))


def index_of_full_table(real):
    def index(self, micro):
        return micro.rows(micro.tokens, Layout(self.split.m), self.mesh).reshape(-1)

    return index


def no_gather(real):
    return lambda self, block: ready(block)


def reduce_at_once(self):
    self.deferred = set()


FAULTS = {
    # gradients that are declared partial along too few or too many axes
    "norm, one axis missing": (TWO_D, declared("gamma", without("x"))),
    "norm, one axis too many": (ONE_D, declared("gamma", with_axis("x"))),
    "bias, one axis missing": (THREE_D, declared("proj.bias", without("y"))),
    "bias, data axis missing": (ONE_D, declared("up.bias", without("d"))),
    "bias, sharded axis too many": (TWO_D, declared("qkv.bias", with_axis("y"))),
    "bias of owned rows": (
        OWNED,
        replaced(layers, "row_axes", lambda _: lambda layout: layout[0]),
    ),
    "positions, data axis missing": (RING, declared("position", without("d"))),
    "positions, context axis missing": (RING, declared("position", without("c"))),
    "shared KV head": (LLAMA, declared("k.weight", without("y"))),
    "balancing bias": (EXPERTS, declared("router.bias", without("d"))),
    "router, data axis missing": (EXPERTS, declared("router.weight", without("d"))),
    "experts, data axis missing": (EXPERTS, declared("experts.up.weight", without("d"))),
    "experts, expert axis too many": (EXPERTS, declared("experts.up.weight", with_axis("e"))),
    "table, data axis missing": (ONE_D, declared("token", without("d"))),
    "context axis missing": (RING, declared("qkv.weight", without("c"))),
    # gradient buckets
    "bucket, first axis left out": (TWO_D, all_sums_but(0)),
    "bucket, groups of replicas left out": (GROUPS, all_sums_but(-1)),
    "bucket, data axis left out": (ONE_D, all_sums_but(0)),
    # statistics of a shard
    "LayerNorm of a shard": (THREE_D, after_init(LayerNorm, no_axes)),
    "RMSNorm of a shard": (LLAMA, after_init(RMSNorm, no_axes)),
    "norm, backward sums of a shard": (
        THREE_D,
        replaced(LayerNorm, "_input_grad", backward_without_sums),
    ),
    "softmax over a shard": (ONE_D, after_init(loss.CrossEntropy, no_axes)),
    "sum instead of maximum": (ONE_D, in_call("all_reduce", 3, summed)),
    # operations on partial sums
    "bias before the reduction": (ONE_D, before_reduction(add_one)),
    "square before the reduction": (THREE_D, before_reduction(square)),
    "GELU before the reduction": (TWO_D, before_reduction(activate)),
    # dropout masks
    "mask of the first rows": (ONE_D, masks(first_rows)),
    "mask of the first columns": (THREE_D, masks(first_columns)),
    "mask of the data rank": (ONE_D, masks(key_of_rank("x"))),
    "masks of the first heads": (TWO_D, replaced(HeadBlock, "heads", first_heads)),
    "masks of the first samples": (
        ONE_D,
        replaced(HeadBlock, "samples", first_samples),
    ),
    "masks of the first members": (
        HEADS,
        replaced(HeadBlock, "heads", first_heads),
    ),
    # rows and indices of another rank
    "tokens of the first rank": (ONE_D, replaced(microbatch.Microbatch, "rows", rows_of_first)),
    "targets of the first rank": (ONE_D, replaced(gpt2.Head, "targets", targets_of_first)),
    "token indices of the full table": (ONE_D, replaced(Embedding, "index", index_of_full_table)),
    # experts
    "routing without all tokens": (EXPERTS, replaced(ExpertMixture, "_along_k", no_gather)),
    "no dispatch": (EXPERTS, in_call("all_to_all", 2, unchanged)),
    # reductions at the end of the step that the backward pass has already done
    "dW twice": (ONE_D, after_init(Matmul, reduce_at_once)),
}


@pytest.mark.parametrize("name", strided(FAULTS, 3))
def test_planted_faults_are_found(monkeypatch, name):
    mix, plant = FAULTS[name]
    plant(monkeypatch)
    with pytest.raises(ValueError, match="axis"):
        proof_of(mix)


SPLITS = [
    '{m="z",k="x",n="y",own="y"}',
    '{m="z",n="x",k="y",replicate="z x"}',
    '{m="x y",k="z",own="x"}',
    '{n="x y",k="z",replicate="y",own="z"}',
]


@pytest.mark.parametrize("split", SPLITS)
def test_custom_splits_are_proved_and_their_faults_are_found(monkeypatch, split):
    mix = f"d=2 x=2 y=2 z=2 {SMALL} zero=1 batch=96 split={shlex.quote(split)}"
    proof_of(mix)
    before_reduction(square)(monkeypatch)
    with pytest.raises(ValueError, match="axis"):
        proof_of(mix)


def test_a_wrong_declaration_is_named(monkeypatch):
    mix, plant = FAULTS["bias, data axis missing"]
    plant(monkeypatch)
    message = "the gradient of layers.3.up.bias is a partial sum along axis d, but Parameters.add"
    with pytest.raises(ValueError, match=message):
        proof_of(mix)


def test_commands_prove_the_layout_unless_it_is_disabled(monkeypatch):
    _, plant = FAULTS["bias before the reduction"]
    plant(monkeypatch)
    words = ["--mesh.x", "2", "--mesh.y", "1", "--mesh.z", "1", "--parallel.scheme", "1d"]
    message = "^guard.layout: embedding, forward pass: add.gather_rows.: adds a partial sum"
    with pytest.raises(ValueError, match=message):
        predicted_step(None, words, "h100")
    config = load_resolved(None, words)
    with pytest.raises(ValueError, match=message):
        train.checked_program(config, this_machine=False)
    train.checked_program(replace(config, guard=GuardConfig(layout=False)), this_machine=False)
