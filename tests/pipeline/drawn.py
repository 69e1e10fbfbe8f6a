"""Mixes drawn at random, as lines of words (tests.pipeline.mixes): any split of three axes
on up to 12 ranks with any schedule, most of which the rules allow."""

from math import prod

from hypothesis import strategies as st

from hpc3d.pipeline.schedule import SCHEDULES

RANKS = 12
SGD = "optimizer=sgd learning_rate=0.5 warmup=0 decay=constant weight_decay=0 steps=2"
# Sizes that most meshes divide, and some that few do; norms lie on both sides of a clip of 4.
MODELS = (
    f"{SGD} layers=4 hidden=24 heads=24 batch=48 sequence=4 clip=0",
    f"{SGD} layers=2 hidden=48 heads=12 batch=24 sequence=4 clip=4 tied=false",
    f"{SGD} layers=4 hidden=24 heads=12 batch=24 sequence=8 clip=0 gelu=exact",
    f"{SGD} layers=2 hidden=12 heads=6 batch=12 sequence=12 clip=0 dropout=0.25",
    "steps=3 layers=4 hidden=24 heads=12 batch=48 sequence=1 vocabulary=23",
    f"{SGD} layers=2 hidden=24 heads=12 batch=24 sequence=4 clip=0 kind=bert padding=4",
)
MIXTURES = tuple(
    f"{SGD} layers=2 hidden=24 heads=12 batch=48 sequence=4 clip=0 {experts}"
    for experts in (
        "experts=4 top_k=2 capacity=1",
        "experts=6 moe_every=2 shared_experts=1 gelu=exact",
        "experts=3 capacity=0.5 balance_bias=0.1 z_loss=0 dropout=0.25",
        "experts=4 top_k=3 capacity=0 kind=llama kv_heads=2 ffn=12",
    )
)
MOST = st.integers(0, 9).map(bool)  # and at last its contrary


@st.composite
def splits(draw):
    """Letters of a split: a loop and a way of storage for each axis, and now and then another."""
    axes = draw(st.permutations("xyz"))[: draw(st.integers(1, 3))]
    panels = draw(st.integers(0, 4)) == 4
    letters = {}
    for number, axis in enumerate(axes):
        loop = draw(st.sampled_from("mnk")) if not panels else "nmm"[number]
        way = draw(st.sampled_from(["", "", "replicate", "own"]))
        way = "panels" if panels and not number else way
        for key in filter(None, [loop, way]):
            letters.setdefault(key, []).append(axis)
    if not draw(MOST):
        key = draw(st.sampled_from(["m", "n", "k", "replicate", "own", "panels", "defer"]))
        letters.setdefault(key, []).append(draw(st.sampled_from("xyzd")))
    return {key: " ".join(letters[key]) for key in sorted(letters)}


@st.composite
def sizes(draw, axes):
    """Axis -> size, of at most RANKS ranks."""
    found = {}
    for axis in draw(st.permutations(axes)):
        most = min(RANKS // prod(found.values()), 2 if axis == "p" else 4)
        found[axis] = draw(st.sampled_from([n for n in (2, 1, 3, 4) if n <= most]))
    return found


@st.composite
def schedules(draw, stages):
    """Words of a schedule, on as many chunks as it wants."""
    name = draw(st.sampled_from([*SCHEDULES] if stages > 1 else ["none", "zb-v", "1f1b"]))
    words = {"schedule": name}
    if name.startswith("pipedream"):
        words |= {"tied": "false", "clip": 0, "dropout": 0}
    return words


@st.composite
def contexts(draw, ranks):
    """Words of how sequences are cut, and of attention."""
    ways = ["ring", "all-to-all"] if ranks > 1 else ["ring"]
    words = {"context": draw(st.sampled_from([*ways, "both"] if ranks == 4 else ways))}
    if words["context"] == "both":
        words["ulysses"] = 2
    if words["context"] == "all-to-all" or ranks == 1:
        words["attention"] = draw(st.sampled_from(["full", "chunked"]))
    return words


@st.composite
def layouts(draw, experts=False):
    """The words of a mix that a serial model has not."""
    letters = draw(splits())
    axes = sorted({*" ".join(letters.get(loop, "") for loop in "mnk").split()} & {*"xyz"})
    mesh = draw(sizes([*axes, "d", "p", "c", *"e" * experts]))
    split = ",".join(f'{key}="{names}"' for key, names in letters.items())
    words = {
        **mesh,
        **draw(schedules(mesh["p"])),
        **draw(contexts(mesh["c"])),
        "split": f"'{{{split}}}'",
        "zero": draw(st.integers(0, 3)),
        "microbatches": draw(st.sampled_from([1, 2, 3, 4])),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "keep_gathered": draw(st.sampled_from(["true", "false"])),
        "overlap": draw(st.sampled_from(["true", "false"])),
        "bucket_mb": draw(st.sampled_from([25, 0.01, 0])),
    }
    return " ".join(f"{key}={value}" for key, value in words.items())


def mixes():
    """A line of words."""
    return st.builds("{} {}".format, st.sampled_from(MODELS), layouts())


def mixtures():
    """A line of words of a model with experts."""
    return st.builds("{} {}".format, st.sampled_from(MIXTURES), layouts(experts=True))
