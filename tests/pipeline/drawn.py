"""Random training configurations as lines of words (tests.pipeline.mixes).

A case is a mix, or two mixes of one model with ` then ` between them: the second one resumes from
a checkpoint of the first. Most cases satisfy the configuration rules.
"""

import shlex
from math import prod

from hypothesis import strategies as st

from hpc3d.model.families import FAMILIES, kinds_with
from hpc3d.model.qkv.query_norm import HeadNorm
from hpc3d.pipeline.schedule import SCHEDULES
from hpc3d.tensor.split import SCHEMES

RANKS = 8
# Learning rates at which a few steps hardly amplify rounding errors.
RATES = {
    "sgd": 0.1,
    "adamw": 0.002,
    "adamw-8bit": 0.002,
    "lion": 0.002,
    "muon": 0.02,
    "adafactor": 0.002,
}
TORCH = "sgd", "adamw"  # optimizers that tests.pipeline.in_torch has
SEQUENCES = {4: 48, 8: 48, 12: 24, 24: 24}  # tokens of a sequence -> sequences of a batch
MOST = st.integers(0, 9).map(bool)  # shrinks to False
SELDOM = st.integers(0, 3).map((3).__eq__)  # shrinks to False
SWITCH = st.sampled_from(["true", "false"])
# Words that make results depend on the layout beyond float64 rounding.
INEXACT = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    *({"reduce_dtype": dtype} for dtype in ("float32", "bfloat16")),
    {"dtype": "bfloat16", "reduce_dtype": "float32"},
    {"dtype": "float16", "reduce_dtype": "float16"},
    *({"keep_dtype": dtype} for dtype in ("bfloat16", "int8", "float8")),
    *({"product_dtype": "float8", "product_scale": scale} for scale in ("block", "tensor")),
    {"compression": "powersgd", "compression_rank": 2},
    {"compression": "top-k", "compression_share": 0.25},
)
EXPERTS = (
    {"experts": 4, "top_k": 2, "capacity": 1},
    {"experts": 6, "moe_every": 2, "shared_experts": 1},
    {"experts": 3, "capacity": 0.5, "balance_bias": 0.1, "z_loss": 0},
    {"experts": 4, "top_k": 3, "capacity": 0, "balance_loss": 0},
)
SCALINGS = (
    '{type="linear",factor=4}',
    '{type="dynamic",factor=4,original=2}',
    '{type="yarn",factor=4,original=2}',
    "{factor=4,low=1,high=4,original=8}",
)
OF_FAMILIES = {  # key of some model families -> values, and how often it is set
    "ffn": ([48, 24, 256], st.booleans()),
    "head_dim": ([2, 4, 6, 8], st.booleans()),
    "rope_scaling": (SCALINGS, SELDOM),
    "rope_fraction": ([0.5], SELDOM),
    "rope_window_theta": ([20], st.booleans()),
    "query_scalar": ([9], SELDOM),
    "score_cap": ([0.7], MOST),
    "logit_cap": ([1.5], MOST),
    "attention_bias": (["true"], SELDOM),
    "mlp_bias": (["true"], SELDOM),
    "gelu": (["tanh", "exact"], st.just(True)),
    "padding": ([4], st.booleans()),
}

OVERLAPS = (
    {},
    {"prefetch": "true"},
    {"chunked_products": 2},
    {"prefetch": "true", "chunked_products": 3},
)
WHOLE = "panels", "own", "summa", "broadcast"  # storage and schemes without chunked products


def rendered(words):
    return " ".join(f"{key}={shlex.quote(str(value))}" for key, value in words.items())


def widths_of(family):
    """Return the widths of heads of a family.

    The norm of two features is nearly a sign: rounding grows by a factor of 1e7 in four steps.
    """
    narrow = [] if family.query_norm is HeadNorm else [2]
    return [*narrow, 4] if family.rotary else [2, 1, 4]


@st.composite
def models(draw):
    """Draw the words of a model, its optimizer and its number types."""
    kind = draw(st.sampled_from([*FAMILIES]))
    rotary = FAMILIES[kind].rotary
    hidden = draw(st.sampled_from([24, 48, 12, 20]))
    width = draw(st.sampled_from(widths_of(FAMILIES[kind])))
    sequence = draw(st.sampled_from([*SEQUENCES]))
    words = {
        "kind": kind,
        "layers": draw(st.sampled_from([2, 4, 3])),
        "hidden": hidden,
        "heads": hidden // width,
        "sequence": sequence,
        "batch": SEQUENCES[sequence],
        "tied": draw(SWITCH),
        "steps": 2,
        "clip": draw(st.sampled_from([0, 4, 0.5])),
    }
    if draw(SELDOM):
        words["dropout"] = 0.25
    if kind in kinds_with("kv_heads"):
        fitting = [n for n in (2, 3, 6, 12) if hidden // width % n == 0]
        words["kv_heads"] = draw(st.sampled_from([hidden // width, *fitting]))
    words |= draw(family_keys(kind))
    words |= draw(texts(kind, sequence))
    if kind in kinds_with("experts") and draw(st.booleans()):
        words |= draw(st.sampled_from(EXPERTS))
    noisy = "qkv" in FAMILIES[kind].biased and "rope_fraction" in words
    words |= draw(optimizers(rotary and not noisy))
    if draw(SELDOM):
        for more in draw(st.lists(st.sampled_from(INEXACT), min_size=1, max_size=2)):
            words |= more
    if words.get("dtype") in ("bfloat16", "float16"):
        words.pop("balance_bias", None)
    if draw(SELDOM):
        words |= {"eval_every": 1, "validation": 0.5}
    return words


@st.composite
def texts(draw, kind, sequence):
    """Draw the words of sliding windows and packed documents, and of a mixture of texts."""
    words = {}
    if FAMILIES[kind].causal and draw(SELDOM):
        # With a window of one token, the gradients of q and k are rounding noise.
        words["window"] = draw(st.integers(2, sequence))
        words["global_every"] = draw(st.sampled_from([0, 2, 3]))
    if FAMILIES[kind].causal and draw(SELDOM):
        words |= {"boundaries": "true", "separator": draw(st.integers(0, 3))}
    return words | (draw(mixtures()) if draw(SELDOM) else {})


@st.composite
def mixtures(draw):
    """Draw the words of a list of texts, each of which is read for several epochs."""
    weights = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    names = ",".join(f'"{number}.h5"' for number in range(len(weights)))
    shuffle = draw(st.sampled_from(["sequences", "documents"]))
    return {"path": f"[{names}]", "weights": weights, "shuffle": shuffle}


@st.composite
def family_keys(draw, kind):
    """Draw the words of the keys that only some model families have, except experts."""
    return {
        key: value
        for key, (values, rate) in OF_FAMILIES.items()
        if kind in kinds_with(key) and draw(rate)
        for value in [draw(st.sampled_from(values))]
        if key != "head_dim" or value != 2 or 2 in widths_of(FAMILIES[kind])
    }


@st.composite
def optimizers(draw, rotary):
    """Draw the words of an optimizer.

    Adafactor divides by the norm of each bias. Without rotary positions, the gradient of the key
    bias is rounding noise, so such models do not train with Adafactor. `rotary` is False if there
    are no rotary positions for all features.
    """
    name = draw(st.sampled_from([each for each in RATES if rotary or each != "adafactor"]))
    words = {"optimizer": name, "learning_rate": RATES[name], "warmup": 0, "decay": "constant"}
    if name == "muon":
        words["orthogonalize"] = draw(st.sampled_from(["in-turn", "sharded"]))
    return words


@st.composite
def splits(draw, experts):
    """Draw the text of a split: the loop and the storage of each axis, rarely an extra axis."""
    storage = ["", "", "replicate", *["own"] * (not experts or not draw(MOST))]
    axes = draw(st.permutations("xyz"))[: draw(st.integers(1, 3))]
    panels = draw(st.integers(0, 4)) == 4
    letters = {}
    for number, axis in enumerate(axes):
        loop = draw(st.sampled_from("mnk")) if not panels else "nmm"[number]
        way = draw(st.sampled_from(storage))
        way = "panels" if panels and not number else way
        for key in filter(None, [loop, way]):
            letters.setdefault(key, []).append(axis)
    if not draw(MOST):
        key = draw(st.sampled_from(["m", "n", "k", "replicate", "own", "panels", "defer"]))
        letters.setdefault(key, []).append(draw(st.sampled_from("xyzd")))
    return {key: " ".join(letters[key]) for key in sorted(letters)}


@st.composite
def ways(draw, model):
    """Draw the words of a scheme or a split, and the tensor axes of its loops."""
    if draw(SELDOM):
        name = draw(st.sampled_from([*SCHEMES]))
        words, letters = {"scheme": name}, vars(SCHEMES[name])
    else:
        letters = draw(splits("experts" in model))
        split = ",".join(f'{key}="{names}"' for key, names in letters.items())
        words = {"split": f"{{{split}}}"}
    axes = " ".join(letters.get(loop, "") for loop in "mnk").split()
    return words, sorted({*axes} & {*"xyz"})


@st.composite
def meshes(draw, model, axes):
    """Draw {axis: size} for at most RANKS ranks."""
    divide = draw(MOST)
    fits = {
        **dict.fromkeys("xyz", lambda n: not divide or model["heads"] % n == 0),
        "p": lambda n: n <= model["layers"],
        "c": lambda n: model["sequence"] % (2 * n) == 0,
        "e": lambda n: model.get("experts", 1) % n == 0,
    }
    found = {}
    for axis in draw(st.permutations([*axes, *"dpc", *"e" * ("experts" in model)])):
        most, fitting = RANKS // prod(found.values()), fits.get(axis, lambda n: True)
        sizes = [n for n in (2, 1, 2, 3, 4) if n <= most and (n == 1 or fitting(n))]
        found[axis] = draw(st.sampled_from(sizes))
    return found


@st.composite
def schedules(draw, model, mesh):
    """Draw the words of a schedule, its microbatches and the layers of its stages."""
    stages, micros = mesh["p"], [2, 1, 3, 4]
    chunks = {name: each.chunks or 2 for name, each in SCHEDULES.items()}
    names = [
        name
        for name, each in SCHEDULES.items()
        if stages * chunks[name] <= model["layers"]
        and (name == "none") <= (stages == 1)
        and each.asynchronous <= (stages > 1 and model["optimizer"] in TORCH)
    ]
    name = draw(st.sampled_from(names))
    words = {"schedule": name}
    if SCHEDULES[name].asynchronous:
        words |= {"dropout": 0}
    if SCHEDULES[name].update_per_microbatch:
        words |= {"tied": "false", "clip": 0}
    if draw(MOST):
        least = stages if name in ("interleaved", "pipedream-2bw") else 1
        rows = model["batch"] // prod(size for axis, size in mesh.items() if axis not in "pc")
        micros = [n for n in micros if n >= least and rows % n == 0] or micros
    words["microbatches"] = draw(st.sampled_from(micros))
    if name == "interleaved" and stages * 3 <= model["layers"]:
        chunks[name] = words["chunks"] = draw(st.sampled_from([2, 3]))
    if draw(SELDOM):
        parts, layers = stages * chunks[name], model["layers"]
        edges = sorted(draw(st.integers(0, layers)) for _ in range(parts - 1))
        counts = [b - a for a, b in zip([0, *edges], [*edges, layers])]
        words["layers_per_stage"] = counts
    return words


@st.composite
def contexts(draw, model, ranks):
    """Draw the words of context parallelism and attention."""
    fits = model.get("kv_heads", model["heads"]) % ranks == 0 or not draw(MOST)
    kinds = ["ring", "all-to-all"] if ranks > 1 and fits else ["ring"]
    words = {"context": draw(st.sampled_from([*kinds, "both"] if ranks == 4 else kinds))}
    if words["context"] == "both":
        words["ulysses"] = 2
    if words["context"] == "all-to-all" or ranks == 1:
        words["attention"] = draw(st.sampled_from(["full", "chunked"]))
    return words


@st.composite
def offloads(draw, model, schedule):
    """Draw the words of offloading, if the model has data to offload."""
    names = {"activations"}
    names |= set() if model["optimizer"] in ("sgd", "adafactor") else {"optimizer"}
    names |= set() if SCHEDULES[schedule].asynchronous else {"parameters"}
    listed = draw(st.lists(st.sampled_from(sorted(names)), min_size=1, unique=True))
    return {"offload": "[" + ",".join(f'"{name}"' for name in listed) + "]"}


@st.composite
def recomputations(draw, layers):
    listed = draw(st.lists(st.integers(0, layers - 1), unique=True))
    modules = ["layernorm", "mlp", "mlp_act", "core_attn"]
    chosen = draw(st.lists(st.sampled_from(modules), unique=True, min_size=1))
    return draw(st.sampled_from(["none", "selective", "full", listed, chosen]))


@st.composite
def pairs(draw, model, mesh):
    """Draw the words of a schedule with passes that alternate while experts exchange tokens."""
    rows = model["batch"] // prod(size for axis, size in mesh.items() if axis not in "pc")
    counts = [n for n in range(2 * mesh["p"], 7) if rows % n == 0] if draw(MOST) else []
    micros = draw(st.sampled_from(counts or [3]))
    return {"overlap_experts": "true", "schedule": "dualpipe-v", "microbatches": micros}


@st.composite
def layouts(draw, model):
    """Draw the words of the mesh and of [parallel] for a model."""
    way, axes = draw(ways(model))
    mesh = draw(meshes(model, axes))
    alternating = mesh.get("e", 1) > 1 and draw(st.booleans())
    schedule = draw(pairs(model, mesh) if alternating else schedules(model, mesh))
    zeros = [0, 1] if "compression" in model and draw(MOST) else [0, 1, 2, 3]
    if "own" in str(way) and draw(MOST):
        zeros = [zero for zero in zeros if zero != 2]
    words = {
        **mesh,
        **way,
        **schedule,
        **draw(contexts(model, mesh["c"])),
        "zero": draw(st.sampled_from(zeros)),
        "recompute": draw(recomputations(model["layers"])),
        "keep_gathered": draw(SWITCH),
        "overlap": draw(SWITCH),
        "bucket_mb": draw(st.sampled_from([25, 0.01, 0])),
    }
    if words["zero"] and not ("compression" in model and draw(MOST)):
        sizes = [n for n in (0, 2, 1, 3, 4) if n == 0 or mesh["d"] % n == 0]
        words["shard"] = draw(st.sampled_from(sizes))
    if draw(SELDOM):
        words["order"] = " ".join(draw(st.permutations("pdcexyz")))
    if draw(st.booleans()) and not alternating:
        words |= draw(offloads(model, schedule["schedule"]))
    words |= draw(st.sampled_from(OVERLAPS))
    if "product_dtype" in model or any(word in str(way) for word in WHOLE):
        words.pop("chunked_products", None)
    return words


@st.composite
def local_updates(draw):
    """Draw the words of local updates."""
    words = {"local_steps": draw(st.sampled_from([2, 1, 3]))}
    if draw(MOST):
        words |= {"outer_learning_rate": 0.7, "outer_momentum": 0.9}
    return words | {"sync": draw(st.sampled_from(["blocking", "stale"])), "steps": 4}


@st.composite
def cases(draw):
    """Draw a mix, or two of them with ` then ` between."""
    model = draw(models())
    mixes = [{**model, **draw(layouts(model))}]
    if draw(SELDOM):
        return rendered(mixes[0] | draw(local_updates()))
    if draw(st.booleans()) and not (mixes[0]["schedule"].startswith("pipedream") and draw(MOST)):
        mixes.append({**model, **draw(layouts(model))})
        for words in mixes:
            words["every"] = 1
    return " then ".join(map(rendered, mixes))
