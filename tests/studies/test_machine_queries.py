"""Operations of passes, compared with closed forms; their times, with simulated steps."""

from math import prod

import numpy as np
import pytest

from hpc3d.model.families import GPT2
from hpc3d.model.spec import ModelSizes
from hpc3d.model.stage import LayerRange
from hpc3d.predict.simulation.simulator import simulate
from hpc3d.studies.machine_queries import work_of
from hpc3d.studies.vtrain import PARTS, ProfileFactors, one_f_one_b
from hpc3d.tensor.split import SCHEMES
from hpc3d.trace.schema import CATEGORY, PHASE
from tests.pipeline.mixes import config_of
from tests.predict.fixed import MACHINE

BLOCK = LayerRange(range(1), first=False, last=False)
HALF = np.dtype(np.float16)


def flop(asked):
    """Return the FLOPs of tensor-core products; products with one row are sums over tokens."""
    products = [(args, n) for (method, args), n in asked.items() if method == "product"]
    return sum(2 * prod([*args[:3], args[4]]) * n for args, n in products if args[0] > 1)


def calls(asked):
    return {args: n for (method, args), n in asked.items() if method == "call"}


@pytest.mark.parametrize("t", [1, 2, 4])
def test_block_queries_match_the_megatron_formulas(t):
    """Forward: 24 b s h^2 + 4 b s^2 h (arXiv:2205.05198, appendix A); backward: twice as much; two
    all-reduces of b s h in each pass (arXiv:2104.04473, section 3.2)."""
    b, s, h = 3, 64, 128
    work = work_of(ModelSizes(1, h, 4, s, 256), SCHEMES["1d"], {"p": 1, "x": t}, b, HALF, BLOCK)
    forward = (24 * b * s * h**2 + 4 * b * s**2 * h) // t
    assert (flop(work.forward), flop(work.backward)) == (forward, 2 * forward)
    received = 2 * b * s * h * HALF.itemsize * (t - 1) // t
    both = {("all_reduce", received, tuple(range(t))): 2} if t > 1 else {}
    assert calls(work.forward) == calls(work.backward) == both
    # Weights and biases of columns are cut; norms and biases of row-parallel products are not.
    assert work.parameters == 12 * h**2 // t + 7 * h // t + 6 * h


def test_head_and_embedding_queries_match_the_table_products():
    """The logits have a product and two gradients, 2 b s h V each; the embedding has none."""
    b, s, h, v = 2, 32, 64, 512
    how = ModelSizes(1, h, 4, s, v), SCHEMES["1d"], {"p": 1}, b, HALF
    head, embedding = (work_of(*how, PARTS[name]) for name in ("head", "embedding"))
    assert (flop(head.forward), flop(head.backward)) == (2 * b * s * h * v, 4 * b * s * h * v)
    assert flop(embedding.forward) == flop(embedding.backward) == 0
    assert (head.parameters, embedding.parameters) == (v * h + 2 * h, v * h + s * h)


@pytest.mark.parametrize("p", [1, 2, 4])
def test_tallied_pass_times_match_simulated_ones(p):
    """Compares the time from the first forward to the last backward pass."""
    found = {m: (by_tally(p, m), by_clock(p, m)) for m in (4, 9)}
    for tallied, simulated in found.values():
        assert tallied == pytest.approx(simulated, rel=2e-3)
    more = np.subtract(found[9], found[4])
    assert more[0] == pytest.approx(more[1], rel=5e-4)


def config_with(p, micros):
    sizes = f"microbatches={micros} batch={2 * micros} layers=4 hidden=256 heads=4 sequence=128"
    how = f"scheme=1d dtype=float32 tied=false schedule={'1f1b' if p > 1 else 'none'}"
    return config_of(f"p={p} {sizes} {how}")


def by_tally(p, micros):
    config, calibration = config_with(p, micros), ProfileFactors(MACHINE, 1.0, {})
    model = GPT2.sizes(config.model, config.model.vocabulary)
    how = model, config.splits["dense"], {"p": 1}, 2, np.dtype(np.float32)
    seconds = {}
    for name, part in PARTS.items():
        work = work_of(*how, part)
        both = (sum(calibration.seconds(asked)) for asked in (work.forward, work.backward))
        seconds[name] = np.array([*both])
    passes = np.repeat((seconds["block"] * config.model.layers / p)[None], p, axis=0)
    passes[0] += seconds["embedding"]
    passes[-1] += seconds["head"]
    message = MACHINE.call("send", 4 * 2 * config.model.sequence * config.model.hidden, (0, 1))
    return one_f_one_b(passes[..., None], micros, np.array([message])).item()


def by_clock(p, micros):
    config = config_with(p, micros)
    rows = np.concatenate([run.rows for run in simulate(config, config.model.vocabulary, MACHINE)])
    rows = rows[rows["category"] == CATEGORY.index("compute")]
    assert {*rows["phase"].tolist()} == {PHASE.index("forward"), PHASE.index("backward")}
    return ((rows["t_start"] + rows["dur"]).max() - rows["t_start"].min()) / 1e9


def test_equal_stages_match_the_closed_form():
    """(m + p - 1)(t_f + t_b), arXiv:2104.04473 eq. 1, plus two messages per boundary each way."""
    p, m, passes = 4, 6, np.empty((4, 2, 2))
    passes[:, 0], passes[:, 1] = [1.0, 3.0], [2.0, 5.0]
    none, some = one_f_one_b(passes, m, np.zeros(2)), one_f_one_b(passes, p, np.full(2, 0.25))
    assert none.tolist() == [(m + p - 1) * 3, (m + p - 1) * 8]
    assert (some >= one_f_one_b(passes, p, np.zeros(2)) + 2 * (p - 1) * 0.25).all()
