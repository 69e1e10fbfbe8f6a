"""Recomputation in traces: which events are repeated, how often, and what they cost.

The masked half of attention is computed and counted, as in the published formulas.
"""

from collections import Counter
from itertools import groupby, product
from shlex import quote

import numpy as np
import pytest

from hpc3d.predict.simulation.count import every_rank, predict
from hpc3d.trace.schema import CATEGORY, MESSAGE_CODES, OP, PHASE
from tests.pipeline.mixes import config_of
from tests.predict.simulation.test_count import counted
from tests.strided import strided

FORWARD, RECOMPUTE = PHASE.index("forward"), PHASE.index("recompute")

MIXES = """
p=1 schedule=none microbatches=2 layers=2
p=2 x=2 schedule=zb-h1 microbatches=3 scheme=1d
x=2 z=2 schedule=none microbatches=2 layers=2 scheme=2.5d
p=2 x=2 y=2 schedule=1f1b microbatches=3 scheme=2d-summa
p=2 d=2 x=2 schedule=interleaved chunks=2 microbatches=2 zero=3 scheme=1d-sequence
x=2 y=2 z=2 schedule=none microbatches=1 layers=2 keep_gathered=false
""".strip().splitlines()


def repeated(prediction, phase):
    """Return the work of blocks in a phase, with all details and the number of repetitions."""
    events = prediction.events
    chosen = (events["phase"] == phase) & (events["layer"] >= 0)
    chosen &= events["category"] != CATEGORY.index("copy")
    chosen &= ~np.isin(events["op"], MESSAGE_CODES)
    what = ("layer", "microbatch", "chunk", "name", "op", "group", "bytes", "flops")
    return Counter(events[chosen][list(what)].tolist())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "recompute"), strided([*product(MIXES, ("selective", "full"))], 7)
)
def test_recomputed_operations_match_the_forward_pass(line, recompute):
    config = config_of(f"{line} recompute={recompute}")
    for ours, theirs in zip(every_rank(config, 29), counted(config), strict=True):
        assert ours.moved() == theirs.moved()
        assert ours.flops() == theirs.flops()
        for found in (ours, theirs):
            forward, again = repeated(found, FORWARD), repeated(found, RECOMPUTE)
            assert again == (forward if recompute == "full" else of_scores(forward))
            assert again


MODULES = """
p=2 x=2 schedule=zb-h1 microbatches=3 scheme=1d-sequence
x=2 y=2 z=2 schedule=none microbatches=1 layers=2 dropout=0.25
e=2 d=2 schedule=none microbatches=2 layers=2 experts=4 shared_experts=1 zero=3
x=2 y=2 schedule=none microbatches=2 layers=2 scheme=2d-summa kind=bert
""".strip().splitlines()
FLOPS = {'["layernorm","mlp_act"]': 0, '["layernorm","mlp"]': 8 / 24}  # share of a dense block's


@pytest.mark.parametrize(("line", "modules"), strided([*product(MODULES, FLOPS)], 4, 1))
def test_recomputed_modules_repeat_only_their_part_of_the_forward_pass(line, modules):
    config = config_of(f"{line} recompute='{modules}'")
    for ours, theirs in zip(every_rank(config, 29), counted(config), strict=True):
        assert ours.moved() == theirs.moved()
        assert ours.flops() == theirs.flops()
        for found in (ours, theirs):
            forward, again = repeated(found, FORWARD), repeated(found, RECOMPUTE)
            assert again and again <= forward
            if "experts" not in line:
                assert flops_of(again) == FLOPS[modules] * flops_of(forward)


def flops_of(work):
    """Return the FLOPs of products with weights."""
    return sum(count * row[-1] for row, count in work.items() if row[4] == OP.index("gemm"))


def test_listed_layers_are_recomputed():
    listed = {0, 2, 3}
    config = config_of("p=2 d=2 schedule=1f1b microbatches=2 batch=8 recompute=[3,0,2]")
    for rank in every_rank(config, 29):
        forward, again = repeated(rank, FORWARD), repeated(rank, RECOMPUTE)
        assert again and again == {row: n for row, n in forward.items() if row[0] in listed}


def of_scores(work):
    """Return the FLOPs of q k', half of those of attention."""
    attention = {row: count for row, count in work.items() if row[4] == OP.index("attention")}
    return Counter({(*what, flops / 2): count for (*what, flops), count in attention.items()})


ORDERS = {
    "1f1b none": "forward backward",
    "1f1b selective": "forward backward recompute backward",
    "1f1b ['mlp']": "forward recompute backward",
    "1f1b full": "forward recompute backward",
    "zb-h1 none": "forward backward_input backward_weight",
    "zb-h1 selective": "forward backward_input recompute backward_input backward_weight",
    "zb-h1 ['mlp']": "forward recompute backward_input backward_weight",
    "zb-h1 full": "forward recompute backward_input backward_weight",
}


@pytest.mark.parametrize("how", ORDERS)
def test_recomputation_happens_within_the_b_pass(how):
    schedule, recompute = how.split()
    line = f"p=2 x=2 schedule={schedule} microbatches=3 recompute={quote(recompute)}"
    for rank in every_rank(config_of(line), 29):
        layers = set(rank.events["layer"].tolist()) - {-1}
        found = {block_phases(rank.events, *place) for place in product(layers, range(3))}
        assert found == {ORDERS[how]}


def block_phases(events, layer, micro):
    """Return the phases in which a block computes products, in order."""
    own = events[(events["layer"] == layer) & (events["microbatch"] == micro)]
    phases = own["phase"][np.isin(own["op"], [OP.index("gemm"), OP.index("attention")])]
    return " ".join(PHASE[number] for number, _ in groupby(phases))


B, S, H, L, V = 6, 8, 12, 3, 40
SIZES = f"batch={B} sequence={S} hidden={H} heads=4 layers={L} vocabulary={V}"


@pytest.mark.parametrize(
    ("recompute", "blocks", "attention", "head"),
    [("none", 72, 12, 6), ("selective", 72, 14, 6), ("['mlp']", 80, 12, 6), ("full", 96, 16, 6)],
)
@pytest.mark.parametrize("mesh", ["schedule=none", "p=3 x=2 schedule=zb-h1 microbatches=3"])
def test_hardware_flops_match_the_published_formulas(recompute, blocks, attention, head, mesh):
    """blocks B L s h^2 + attention B L s^2 h + head B s h V.

    "none" is equation 7 of arXiv:2205.05198, and "full" is equation 3 of arXiv:2104.04473.
    "selective" repeats q k', 2 B L s^2 h, and "mlp" the up projection, 8 B L s h^2. Equation 8 of
    arXiv:2205.05198 has 12 more than equation 7, as if the product with v and the backward pass of
    attention were repeated, too.
    """
    config = config_of(f"{SIZES} {mesh} recompute={quote(recompute)}")
    total = sum(
        sum(rank.flops()[op] for op in ("gemm", "attention") if op in rank.flops())
        for rank in every_rank(config, V)
    )
    assert total == blocks * B * L * S * H**2 + attention * B * L * S**2 * H + head * B * S * H * V
    formulas = {"none": eq7(), "selective": eq8() - 10 * B * L * S**2 * H, "full": eq3()}
    assert total == pytest.approx(formulas.get(recompute, eq7() + 8 * B * L * S * H**2), rel=1e-14)


def eq7():
    return 72 * B * L * S * H**2 * (1 + S / (6 * H) + V / (12 * H * L))


def eq8():
    return 72 * B * L * S * H**2 * (1 + S / (3 * H) + V / (12 * H * L))


def eq3():
    return 96 * B * L * S * H**2 * (1 + S / (6 * H) + V / (16 * L * H))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_saved_activations_grow_with_microbatches_in_flight(recompute):
    """In 1F1B, a further layer per stage adds min(m, p - i) times its activations on stage i."""
    stages, micros = 4, 3
    n, scores = 6 * 8 * 12, 6 * 4 * 8 * 8
    kept = {"none": 16 * n + scores, "selective": 16 * n, "full": n}[recompute]

    def peak(layers, stage):
        line = f"p={stages} schedule=1f1b microbatches={micros} recompute={recompute}"
        sizes = f"batch={6 * micros} sequence=8 hidden=12 heads=4 layers={layers}"
        config = config_of(f"{line} {sizes}")
        found = predict(config, 29, dict.fromkeys(config.sizes(), 0) | {"p": stage}).peak
        return found["all"] - sum(found[kind] for kind in ("parameter", "gradient", "optimizer"))

    for stage in range(stages):
        more = peak(12, stage) - peak(8, stage)
        assert more == 8 * kept * min(micros, stages - stage)
