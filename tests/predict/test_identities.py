"""Published closed forms for Transformers, compared with the program on abstract arrays.

Other tests cover the small cases: FLOPs by form of recomputation in test_recompute.py, saved
elements of a block in tests/model/test_block.py, and words of a product in
tests/tensor/test_counts.py.
"""

from functools import cache
from math import prod, sqrt
from typing import NamedTuple

import pytest

from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from hpc3d.predict.simulation.count import predict
from hpc3d.trace.schema import CATEGORY, PHASE
from tests.pipeline.mixes import KEYS
from tests.tensor.test_counts import cuboid_words, lower_bound

COMM = CATEGORY.index("comm")
RECOMPUTE = PHASE.index("recompute")


def rank_of(stage=0, **words):
    """Return the Prediction of the first rank of a stage, with keys by their last words."""
    options = [str(part) for key, value in words.items() for part in (f"--{KEYS[key]}", value)]
    config = load(None, options)
    config = resolve(config, prod(config.sizes().values()))
    coords = dict.fromkeys(config.sizes(), 0) | {"p": stage}
    return predict(config, config.model.vocabulary, coords)


class Model(NamedTuple):
    """Published model and its ranks: `billions` of parameters as printed, tensor parallel size t,
    and p stages."""

    billions: str
    heads: int
    hidden: int
    layers: int
    t: int
    p: int
    sequence: int = 2048
    vocabulary: int = 51200

    def words(self, recompute="none"):
        names = ("heads", "hidden", "layers", "sequence", "vocabulary")
        how = {"scheme": "1d", "schedule": "1f1b" if self.p > 1 else "none", "p": self.p}
        how |= {"dropout": 0.1, "dtype": "float16", "recompute": recompute, "microbatches": 1}
        return {name: getattr(self, name) for name in names} | how


# arXiv:2104.04473, table 1.
MODELS = [
    Model("1.7", 24, 2304, 24, 1, 1),
    Model("3.6", 32, 3072, 30, 2, 1),
    Model("7.5", 32, 4096, 36, 4, 1),
    Model("18.4", 48, 6144, 40, 8, 1),
    Model("39.1", 64, 8192, 48, 8, 2),
    Model("76.1", 80, 10240, 60, 8, 4),
    Model("145.6", 96, 12288, 80, 8, 8),
    Model("310.1", 128, 16384, 96, 8, 16),
    Model("529.6", 128, 20480, 105, 8, 35),
    Model("1008", 160, 25600, 128, 8, 64),
]
# arXiv:2205.05198, table 3.
M22, M175 = Model("22", 64, 6144, 48, 8, 1), Model("175", 96, 12288, 96, 8, 8)
M530, M1000 = MODELS[-2:]


def named(model):
    return f"{model.billions}B"


@cache
def stages(model, recompute="none", **mesh):
    """Return predictions of the stages of a model, for one sequence, with the number of equal
    stages: all stages between the first and the last are equal."""
    words = model.words(recompute) | {"batch": 1} | mesh
    number = {0: 1, model.p - 1: 1} | ({1: model.p - 2} if model.p > 2 else {})
    return [(rank_of(stage, **words), count) for stage, count in number.items()]


@pytest.mark.parametrize("model", [*MODELS, M22, M175], ids=named)
def test_parameter_count_matches_the_published_equation(model):
    """12 L h^2 (1 + 13 / (12 h) + (V + s) / (12 L h)): equation 2 of arXiv:2104.04473.

    It omits the norm before the head, 2 h; and the last stage has a copy of the table.
    """
    _, _, h, layers, _, p, s, v = model
    counted = sum(found.peak["parameter"] * count for found, count in stages(model)) / 2  # bytes
    formula = 12 * layers * h**2 + 13 * layers * h + (v + s) * h
    assert counted == formula + 2 * h + (p > 1) * v * h
    _, _, decimals = model.billions.partition(".")
    assert f"{formula / 1e9:.{len(decimals)}f}" == model.billions


def operations(model, recompute, again=True):
    """Return the FLOPs of products and attention of a sequence on the published ranks; only
    repeated ones if `again`."""
    total = 0
    for found, count in stages(model, recompute, x=model.t):
        rows = found.events[(found.events["phase"] != RECOMPUTE) | again]
        total += count * rows["flops"].sum()
    return total * model.t


def equation_7(model):
    """Equation 7 of arXiv:2205.05198: model FLOPs of a sequence."""
    _, _, h, layers, _, _, s, v = model
    return 72 * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * h * layers))


@pytest.mark.parametrize("model", [M22, M175, M530, M1000], ids=named)
def test_flops_match_the_published_equations(model):
    """With repeated blocks, they match equation 3 of arXiv:2104.04473."""
    _, _, h, layers, _, _, s, v = model
    equation_3 = 96 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert operations(model, "none") == pytest.approx(equation_7(model), rel=1e-14)
    assert operations(model, "full", again=False) == pytest.approx(equation_7(model), rel=1e-14)
    assert operations(model, "full") == pytest.approx(equation_3, rel=1e-14)


# arXiv:2205.05198, table 5, with 312 TFLOP/s a GPU: batch, GPUs, seconds, MFU and HFU in percent.
MEASURED = {M22: (4, 8, 1.10, 41.5, 43.7), M175: (64, 64, 13.75, 51.4, 52.8)}


@pytest.mark.parametrize("model", MEASURED, ids=named)
def test_published_utilization_follows_from_published_times(model):
    """The tolerance is two decimals of the seconds and one of the result.

    The published HFU uses equation 8, 12 L s^2 h more than equation 7; the program repeats
    2 L s^2 h of them (test_recompute.py).
    """
    batch, gpus, seconds, mfu, hfu = MEASURED[model]
    once = operations(model, "selective", again=False)
    square = model.layers * model.sequence**2 * model.hidden
    assert operations(model, "selective") == pytest.approx(once + 2 * square, rel=1e-14)
    for flop, published in ((once, mfu), (once + 12 * square, hfu)):
        low, high = (
            100 * batch * flop / (gpus * 312e12 * (seconds + error)) for error in (0.005, -0.005)
        )
        assert low - 0.05 <= published <= high + 0.05
        assert high - low < 0.5


def kept(model, scheme, t, recompute, keep_gathered):
    """Return the bytes of activations that each layer adds to the peak of a step; one sequence."""
    few = (
        rank_of(
            **model._replace(p=1, layers=layers).words(recompute)
            | {"scheme": scheme, "x": t, "batch": 1, "keep_gathered": keep_gathered}
        ).peak
        for layers in (2, 3)
    )
    states = ("parameter", "gradient", "optimizer")
    first, second = (peak["all"] - sum(peak[kind] for kind in states) for peak in few)
    return second - first


# Scheme, ranks, whether gathered operands are kept; a and b / t of sbh (a + b / t), and c of
# c a s / h, of arXiv:2205.05198, table 2, in bytes.
TABLE_2 = {
    "no parallelism": ("1d", 1, "true", 0, 34),
    "tensor parallel": ("1d", 8, "true", 10, 24),
    "and sequence": ("1d-sequence", 8, "false", 0, 34),
}


@pytest.mark.parametrize("form", TABLE_2)
@pytest.mark.parametrize("model", [M22, M175], ids=named)
def test_saved_activations_match_the_published_table(model, form):
    """Table 2 without masks and their results, which are recomputed here.

    These are two masks of one byte per element of X, and, for the probabilities, a mask and their
    product with it, 3 of 5 bytes.
    """
    scheme, t, keep_gathered, whole, part = TABLE_2[form]
    _, a, h, _, _, _, s, _ = model
    x, probabilities = s * h, a * s * s
    masks = 2 * x / (t if scheme == "1d-sequence" else 1)
    published = x * (whole + part / t)
    expected = {
        "none": published - masks + (5 - 3) * probabilities / t,
        "selective": published - masks,
        "full": 2 * x / (t if scheme == "1d-sequence" else 1),
    }
    for recompute, size in expected.items():
        assert kept(model, scheme, t, recompute, keep_gathered) == size


H = 4096
# Tokens over h, ranks: words of a layer over h^2, forward and backward, as 1-D, FSDP, 2-D and 3-D
# cube; and the best cuboid with its p_m, p_k, p_n of a layer's first product.
WORDS = {
    (1, 8): (7.0, 31.5, None, 7.0, 6.0, (1, 2, 4)),
    (1, 64): (7.88, 35.4, 6.23, 2.63, 2.38, (2, 4, 8)),
    (4, 8): (28.0, 31.5, None, 19.0, 13.0, (4, 1, 2)),
    (4, 64): (31.5, 35.4, 13.1, 7.13, 5.63, (8, 2, 4)),
    (16, 8): (112.0, 31.5, None, 67.0, 21.0, (8, 1, 1)),
    (16, 64): (126.0, 35.4, 40.7, 25.1, 11.6, (16, 1, 4)),
    (16, 512): (127.8, 35.9, None, 7.33, 3.95, (32, 2, 8)),
    (0.25, 64): (1.97, 35.4, 4.51, 1.5, 0.75, (1, 4, 16)),
}


def products(tokens, grid):
    """Return M, K, N and p_m, p_k, p_n of the four products of a layer."""
    m, one, two = grid
    columns = [(H, 3 * H, (m, one, two)), (H, H, (m, two, one))]
    columns += [(H, 4 * H, (m, one, two)), (4 * H, H, (m, two, one))]
    return [((tokens, k, n), grid) for k, n, grid in columns]


def calls(tokens, ranks, scheme="3d", keep_gathered="true", **mesh):
    """Return (phase, words) of every call of a layer on one rank, in order."""
    sizes = {"hidden": H, "heads": 512, "layers": 1, "vocabulary": 512}
    sizes |= {"batch": ranks, "sequence": tokens // ranks}
    how = {"scheme": scheme, "keep_gathered": keep_gathered}
    events = rank_of(microbatches=1, schedule="none", **sizes, **how, **mesh).events
    mine = events[(events["category"] == COMM) & (events["layer"] == 0)]
    phases = [PHASE[number] for number in mine["phase"]]
    assert {*phases} <= {"forward", "backward", "optimizer"}
    return [(phase, row["bytes"] / 4) for phase, row in zip(phases, mine)]


def words(*how, **mesh):
    """Return the words of a layer, in both passes, without gradient reductions of vectors."""
    return sum(words for phase, words in calls(*how, **mesh) if phase != "optimizer")


def of_norms(rows, g):
    """Return the words of two norms of `rows`, whose features are split over g ranks: two numbers
    per row are gathered, and two are reduced in the backward pass."""
    return 2 * ((g - 1) * 2 * rows + 2 * (g - 1) / g * 2 * rows)


@pytest.mark.parametrize(("share", "ranks"), WORDS)
def test_communication_volume_of_a_layer_matches_the_formulas(share, ranks):
    """Tests Megatron-LM, FSDP, Optimus, and the saved schedule of a cuboid with its norms."""
    tokens = int(share * H)
    m, w, away = tokens * H, H * H, (ranks - 1) / ranks
    line, sharded, plane, cube, best, grid = WORDS[share, ranks]
    exact = {
        "1d": (words(tokens, ranks, "1d", x=ranks), 8 * away * m, line),
        "fsdp": (words(tokens, ranks, "3d", "false", x=ranks), 36 * away * w, sharded),
    }
    if plane:
        q = round(sqrt(ranks))
        found = words(tokens, ranks, "2d-summa", x=q, y=q) - of_norms(tokens / q, q)
        exact["2d"] = found, 3 * (7 * m + 12 * w) * (q - 1) / ranks, plane
    q = round(ranks ** (1 / 3))
    for name, (pm, pk, pn), printed in (("cube", (q, q, q), cube), ("cuboid", grid, best)):
        found = words(tokens, ranks, x=pm, y=pn, z=pk)
        once = sum(cuboid_words(*each) for each in products(tokens, (pm, pk, pn)))
        exact[name] = found - of_norms(tokens / (pm * pn), pk), 2 * once, printed
    for name, (found, formula, printed) in exact.items():
        assert found == pytest.approx(formula, rel=1e-14), name
        assert found / w == pytest.approx(printed, abs=0.0501 if printed >= 10 else 0.00501), name


def test_mlp_products_attain_the_communication_lower_bound():
    """16 tokens per feature on 512 ranks, the third case of arXiv:2205.13407, theorem 3; the
    attention products would require another grid."""
    tokens, grid = 16 * H, (32, 2, 8)
    mesh = dict(zip(("x", "z", "y"), grid))
    forward = [n for phase, n in calls(tokens, 512, **mesh) if phase == "forward"]
    norms = forward.pop(7), forward.pop(0)
    assert sum(norms) == of_norms(tokens / (32 * 8), 2) / 2
    each = [sum(forward[at : at + 3]) for at in range(0, 12, 3)]
    bounds = [lower_bound(shape, 512) for shape, _ in products(tokens, grid)]
    assert each[2:] == pytest.approx(bounds[2:], rel=1e-12)
    assert min(found / bound for found, bound in zip(each[:2], bounds[:2])) > 1.01


def test_all_layer_products_attain_the_communication_lower_bound():
    """First case: from four tokens per feature and rank on, only weights are gathered."""
    tokens, ranks = 4 * H * 8, 8
    forward = [n for phase, n in calls(tokens, ranks, x=ranks) if phase == "forward"]
    assert forward == [lower_bound(shape, ranks) for shape, _ in products(tokens, (ranks, 1, 1))]
