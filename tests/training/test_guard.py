"""A wrong number stops all ranks in the same step, and its rank is named."""

import re
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from hpc3d.comm.abft.checker import AbftChecker
from hpc3d.comm.communicator import Communicator
from hpc3d.comm.threads import run
from hpc3d.config.input_file import GuardConfig
from hpc3d.console.exit_codes import CHECK_FAILED, NOT_FINITE
from hpc3d.trace.recorder import Recorder
from hpc3d.trace.schema import CATEGORY, EVENTS, record_type
from hpc3d.training.guard import (
    SHOWN,
    Corrupt,
    GuardError,
    GuardFinding,
    LossSpikes,
    NotFinite,
    ReplicaCheck,
    guarded,
    hash_of,
    lines,
    odd_numbers,
    stop,
)
from tests.comm.test_checker import flip
from tests.pipeline.mixes import config_of, trainer_of
from tests.strided import strided

slow = pytest.mark.slow
QUICK = [
    "x=2 scheme=1d",
    "x=2 y=2 z=2 scheme=3d",
    "p=2 d=2 x=2 schedule=1f1b microbatches=2 zero=1",
]
MIXTURE = "d=2 e=2 x=2 zero=1 experts=4 shared_experts=1 balance_bias=0.1"
LAYOUTS = [
    "x=3 scheme=1d-sequence",
    "x=2 y=2 scheme=2d",
    "x=2 y=2 scheme=2d-summa",
    "x=2 y=2 z=2 scheme=2.5d",
    "x=2 y=2 z=2 scheme=3d-broadcast",
    "d=2 x=2 zero=0",
    "d=3 y=3 zero=2",
    "d=3 y=3 zero=3",
    "d=4 shard=2 zero=3",
    "p=4 schedule=zb-h1 microbatches=4 layers=4",
    "p=2 schedule=zb-v chunks=2 microbatches=4 layers=4",
    "p=2 d=2 schedule=interleaved chunks=2 microbatches=2 layers=4 zero=3",
    "p=2 schedule=pipedream microbatches=4 tied=false clip=0",
    "e=2 x=2 y=2 zero=3 experts=4 kind=llama ffn=48",
]
MATRIX = [*QUICK, MIXTURE, *(pytest.param(line, marks=slow) for line in LAYOUTS)]
STEPS = 2


def settled(line):
    return config_of(f"layers=2 steps={STEPS} {line}")


def axes_of(config):
    return [axis for axis, size in config.sizes().items() if size > 1]


class Hurt(Communicator):
    """Communicator that corrupts the first block that it receives while it is `armed`."""

    def __init__(self, comm, bit):
        super().__init__(comm.rank, comm.size, comm.members, comm.pool)
        self.comm, self.bit, self.armed, self.buffer = comm, bit, False, comm.buffer
        for hook in (
            "_all_gather",
            "_reduce_scatter",
            "_all_reduce",
            "_broadcast",
            "_reduce",
            "_all_to_all",
        ):
            setattr(self, hook, self.hurting(hook))
        self._send, self._recv = comm._send, self.hurting("_recv")

    def hurting(self, hook):
        def call(*arguments):
            pending = getattr(self.comm, hook)(*arguments)
            exempt = hook == "_all_reduce" and arguments[1] == "max"
            return pending if exempt else pending.then(self.pass_on)

        return call

    def pass_on(self, block):
        if not self.armed or not block.size:
            return block
        self.armed = False
        return flip(block, 8 * block.itemsize - 2 if self.bit else 8 * block.itemsize - 9, 5)


class Slip(AbftChecker):
    """Checker whose product number `countdown`, counted from when it is set, is wrong."""

    countdown = -1

    def product(self, a, b, c):
        self.countdown -= 1
        if self.countdown == 0:
            c[...] = flip(c, 8 * c.itemsize - 2, c.size // 3)
        super().product(a, b, c)


def trained(line, hurt_rank=None, fault=None, guards=True):
    """Return each rank's exception, or its losses, norms and weights after the last step.

    `fault(mesh, trainer, number, comms)` is called on the faulty rank before each step.
    """
    config = settled(line)

    def rank(mesh):
        comms, hit = {}, mesh.rank == hurt_rank
        if guards:
            if hit:
                comms = {axis: Hurt(comm, mesh.size("x")) for axis, comm in mesh.comms.items()}
                mesh.comms = comms
            mesh = mesh.guarded((Slip if hit else AbftChecker)(mesh.rank))
        trainer, seen = trainer_of(mesh, config), []
        replicas = ReplicaCheck(trainer, int(guards))
        try:
            for number in range(config.train.steps):
                if hit:
                    fault(mesh, trainer, number, comms)
                step = trainer.step(number)
                seen.append((step.loss, step.grad_norm))
                replicas.after(number)
        except GuardError as wrong:
            return wrong
        trainer.buckets.complete()
        return seen, [item.value.copy() for item in trainer.parameters]

    return run(config.sizes(), rank)


def on_one_rank(ranks, hurt, kind=Corrupt):
    """Return the error lines of the faulty rank; all ranks raise, and the others have no lines."""
    assert [type(each) for each in ranks] == [kind] * len(ranks), ranks
    assert [number for number, each in enumerate(ranks) if each.found] == [hurt]
    return [find.line for find in ranks[hurt].found]


LATER = (
    "d=2 x=2 zero=1 microbatches=2 prefetch=true",
    "d=3 local_steps=1 sync=stale steps=4",
    "e=2 x=2 schedule=dualpipe-v microbatches=2 experts=4 overlap_experts=true",
)


@pytest.mark.parametrize("line", [*MATRIX, *LATER])
def test_guards_find_nothing_and_change_nothing(line):
    for ours, bare in zip(trained(line), trained(line, guards=False), strict=True):
        assert ours[0] == bare[0]
        for mine, other in zip(ours[1], bare[1], strict=True):
            np.testing.assert_array_equal(mine, other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("line", MATRIX)
def test_bit_flip_in_a_product_stops_all_ranks_and_names_one(line):
    def fault(mesh, trainer, number, comms):
        mesh.guard.countdown = 4 if number == 1 else -1

    hurt = len(trained(line, guards=False)) - 1
    (text,) = on_one_rank(trained(line, hurt, fault), hurt)
    assert re.match(
        rf"rank {hurt}: step 1, (layer \d, )?\w+: product \[.*: row \d+, column ", text
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("line", MATRIX[1:])
@pytest.mark.slow
def test_bit_flip_in_a_message_stops_all_ranks_and_names_one(line):
    for axis in axes_of(settled(line)):

        def fault(mesh, trainer, number, comms, axis=axis):
            comms[axis].armed = number == 1

        (text,) = on_one_rank(trained(line, 1, fault), 1)
        assert re.match(r"rank 1: step 1, (layer \d, )?\w+: \w+ of \d+ ", text)
        assert f"along {axis}: " in text


def nan_in(kind):
    """Return a fault that puts a NaN into a matrix of a layer, or into its gradient."""

    def fault(mesh, trainer, number, comms):
        items = [i for i in trainer.parameters if i.name.endswith("up.weight") and i.value.size]
        if number == 0 or not items:
            return
        if kind == "value":
            items[0].value[0, 0] = np.nan
            return
        wait = trainer.buckets.wait

        def spoilt():
            wait()
            items[0].grad[0, 0] = np.nan

        trainer.buckets.wait = spoilt

    return fault


@pytest.mark.parametrize(
    ("kind", "line"), strided([*product(["value", "gradient"], ["", *QUICK])], 5, 1)
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_stops_all_ranks_before_the_update_and_is_located(kind, line):
    hurt = 1 if line else 0
    ranks = trained(line, hurt, nan_in(kind))
    assert [type(each) for each in ranks] == [NotFinite] * len(ranks)
    head, first, *_ = lines(ranks[0], [each.found for each in ranks])
    assert "finite: " in head
    place = rf"rank {hurt}: step 1, layer [01], up.weight: 1 of \d+ .* {kind} "
    assert re.match(place, first)
    if kind == "gradient":
        assert sum(len(each.found) for each in ranks) == 1


def test_overflowing_gradient_norm_is_reported_separately():
    def fault(mesh, trainer, number, comms):
        trainer.parameters.sum_of_squares = lambda: np.inf

    (text,) = on_one_rank(trained("x=2 scheme=1d", 1, fault), 1, NotFinite)
    assert re.fullmatch("rank 1: step 0, .* gradients .*", text)


def hurt_replica(kind, name, bit=3):
    def fault(mesh, trainer, number, comms):
        if number != 1:
            return
        item = next(item for item in trainer.parameters if item.name.endswith(name))
        after = trainer.step

        def step(number):
            done = after(number)
            states = trainer.optimizer.states_of(item)
            held = {"value": item.value} | {spec.name: state for spec, state in states}
            block = held[kind]
            block[...] = flip(block, bit, 7)
            return done

        trainer.step = step

    return fault


@pytest.mark.parametrize(
    ("line", "kind", "name", "who"),
    strided(
        [
            ("d=3 zero=0", "value", "up.weight", "rank 1: .* ranks 0 1 2 along d "),
            ("d=3 zero=1", "value", "up.weight", "rank 1: .* ranks 0 1 2 along d "),
            ("d=3 zero=0", "second", "gamma", "rank 1: .*state second of .* along d "),
            (
                "x=3 scheme=1d",
                "first",
                "norm2.beta",
                "rank 1: .*first of .*ranks 0 1 2 along x differ",
            ),
            ("x=2 scheme=1d", "value", "gamma", ".* ranks 0 1 along x "),
            (
                "p=2 schedule=1f1b",
                "value",
                "token",
                ".*token: .* ranks 0 1 along p ",
            ),
            ("d=2 x=2 zero=3", "value", "gamma", ".* along [dx] "),
            (
                "y=3 kind=llama kv_heads=1",
                "value",
                "k.weight",
                "rank 1: .*k.weight: .* ranks 0 1 2 along y ",
            ),
            (
                "d=3 e=2 zero=1 experts=6",
                "value",
                "experts.up.weight",
                "rank 1: .* ranks 1 3 5 along d ",
            ),
            (
                "d=3 e=2 zero=0 experts=6",
                "second",
                "down.weight",
                "rank 1: .*second.* ranks 1 3 5 along d ",
            ),
            ("e=3 zero=1 experts=6", "value", "router.weight", "rank 1: .* ranks 0 1 2 along e "),
            ("d=3 local_steps=2", "value", "up.weight", "rank 1: .* ranks 0 1 2 along r "),
            ("d=3 local_steps=2", "agreed", "gamma", "rank 1: .*state agreed of .* along r "),
            (
                "d=3 local_steps=1 sync=stale",
                "agreed",
                "gamma",
                "rank 1: .*state agreed of .* along r ",
            ),
            (
                "e=3 balance_bias=0.1 experts=6",
                "value",
                "router.bias",
                "rank 1: .* ranks 0 1 2 along e ",
            ),
        ],
        3,
    ),
)
def test_replica_check_detects_flips_in_parameters_and_states(line, kind, name, who):
    ranks = trained(line, 1, hurt_replica(kind, name))
    assert [type(each) for each in ranks] == [Corrupt] * len(ranks)
    found = [find.line for each in ranks for find in each.found]
    assert found
    for text in found:
        assert re.search(who, text), text
        assert "step 1, " in text
        assert name in text


def test_replica_check_follows_agreements():
    """Workers have different states in every step, and the same parameters in every second one."""
    assert all(isinstance(each, tuple) for each in trained("d=3 local_steps=2", guards=True))
    config = settled("d=2 local_steps=3")

    def every(mesh):
        trainer = trainer_of(mesh, config)
        return [ReplicaCheck(trainer, interval).every for interval in (0, 1, 3, 4)]

    assert run(config.sizes(), every) == [[0, 3, 3, 6]] * 2


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
def test_every_bit_flip_changes_the_hash(dtype):
    """The block requires several rounds, and the last one is shorter."""
    block, factors = np.random.default_rng(3).normal(size=(3, 5)).astype(dtype), odd_numbers(4)
    bits = 8 * block.itemsize
    flipped = [flip(block, bit, place) for bit in range(bits) for place in range(block.size)]
    hashes = {hash_of(each, factors) for each in [block, *flipped]}
    assert len(hashes) == 1 + bits * block.size
    assert all(0 <= each < 1 << 64 for each in hashes)
    assert hash_of(block.copy(), factors) == hash_of(block, factors)


def test_hash_depends_on_element_positions():
    block, factors = np.arange(12, dtype=np.float32), odd_numbers(4)
    moved = [np.roll(block, shift) for shift in range(12)]
    assert len({hash_of(each, factors) for each in moved}) == 12
    assert hash_of(block[:0], factors) == 0
    assert (odd_numbers(99) % 2 == 1).all()


def test_replicas_are_compared_every_n_steps():
    def rank(mesh):
        trainer = trainer_of(mesh, settled("x=2 scheme=1d"))
        replicas = ReplicaCheck(trainer, 3)
        item = next(item for item in trainer.parameters if item.name.endswith("gamma"))
        item.value[0] = mesh.rank
        stops = []
        for number in range(6):
            try:
                replicas.after(number)
            except Corrupt:
                stops.append(number)
        return stops

    assert run({"x": 2}, rank) == [[2, 5]] * 2


def test_mesh_is_guarded_only_on_request():
    def rank(mesh):
        plain = guarded(mesh, GuardConfig())
        return plain is mesh, guarded(mesh, GuardConfig(abft_every=3)).guard.every

    assert run({"x": 2}, rank) == [(True, 3)] * 2


def test_every_finding_is_a_marker_in_the_trace():
    def rank(mesh):
        recorder = Recorder(None, {"rank": mesh.rank}, 16, clock=lambda: 7)
        with pytest.raises(Corrupt):
            stop(mesh.traced(recorder), [GuardFinding(0, "this")] * mesh.rank)
        return np.frombuffer(recorder.table, record_type(EVENTS), recorder.count), recorder.strings

    for number, (events, names) in enumerate(run({"x": 3}, rank)):
        assert len(events) == number
        assert [*names] == ["guard: this"] * (number > 0)
        assert (events["category"] == CATEGORY.index("marker")).all()
        assert not events["dur"].any()


def test_few_lines_are_shown_starting_with_the_likely_cause():
    found = [[GuardFinding(rank % 3, f"rank {rank}")] for rank in range(30)]
    head, *said, rest = lines(Corrupt([]), found)
    assert head == "corrupted: 30 found"
    assert said == [f"rank {rank}" for rank in range(0, 30, 3)][:SHOWN]
    assert " 20 " in rest
    assert lines(NotFinite([]), [[], [GuardFinding(0, "this")]])[1:] == ["this"]
    assert (Corrupt.code, NotFinite.code) == (CHECK_FAILED, NOT_FINITE)


def test_spike_is_a_loss_far_above_the_recent_ones():
    spikes = LossSpikes(6.0)
    quiet = [3.2 + 0.1 * (-1) ** number for number in range(10)]
    assert [spikes.see(loss) for loss in [9.0, *quiet]] == [None] * 11
    assert spikes.see(3.3) is None
    for _ in range(60):  # the 9.0 is forgotten
        [spikes.see(loss) for loss in quiet[:2]]
    assert spikes.see(3.79) is None
    assert re.match("loss spike 1: 5.1000 .* 3.2", spikes.see(5.1))
    assert spikes.see(3.2) is None
    assert spikes.count == 1


@pytest.mark.parametrize(
    ("before", "loss", "spike"),
    [
        ([1.0, 3.0] * 5, 8.0, False),  # the mean and 6 standard deviations
        ([1.0, 3.0] * 5, 8.001, True),
        ([1.0, 3.0] * 4 + [1.0], 1e9, False),  # 9 are too few
        ([1e6] + [1.0, 3.0] * 24 + [1.0], 100.0, False),  # one of the last 50
        ([1e6] + [1.0, 3.0] * 25, 100.0, True),
    ],
)
def test_spike_threshold(before, loss, spike):
    spikes = LossSpikes(6.0)
    for each in before:
        spikes.see(each)
    assert bool(spikes.see(loss)) is spike


@pytest.mark.parametrize(("limit", "before"), [(0.0, 30), (6.0, 9)])
def test_no_spike_is_reported_when_off_or_too_early(limit, before):
    spikes = LossSpikes(limit)
    assert [spikes.see(1.0 + number % 2) for number in range(before)] == [None] * before
    assert spikes.see(1e9) is None
