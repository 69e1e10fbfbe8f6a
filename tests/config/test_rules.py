"""Every rule by the line that it prints, and the best cuboid."""

import re
from math import prod

import pytest

from hpc3d.config.input_file import Config
from hpc3d.config.load import load
from hpc3d.config.rules import received_elements, resolve, violations
from hpc3d.model.families import with_epsilon
from tests.config.refused import problems
from tests.elided import elided

RULES = {
    "seed": ("-1", "seed = -1: ... 0"),
    "name": ("a/b", "name = 'a/b': ... . _ + -"),
    "mesh.x": ("0", "mesh.x = 0: ... 1"),
    "mesh.d": ("-2", "mesh.d = -2: ... 1"),
    "mesh.p": ("0", "mesh.p = 0: ... 1"),
    "mesh.e": ("2", "mesh.e = 2: ... 1"),
    "mesh.order": ("x y z", "mesh.order = 'x y z': ... p d c e x y z once"),
    "mesh.transport": ("tcp", "mesh.transport: ... 'auto', 'mpi', 'nccl' or 'host-staged'"),
    "parallel.scheme": ("4d", "parallel.scheme: ... '1d', '1d-sequence',"),
    "parallel.zero": ("4", "parallel.zero: ... 0, 1, 2 or 3, not 4"),
    "parallel.bucket_mb": ("-1", "parallel.bucket_mb = -1.0: ... 0 ... inf"),
    "parallel.microbatches": ("0", "parallel.microbatches = 0: ... 1"),
    "parallel.chunks": ("0", "parallel.chunks = 0: ... 1"),
    "parallel.recompute": ("half", "parallel.recompute: ... 'none', 'selective'"),
    "model.layers": ("0", "model.layers = 0: ... 1"),
    "model.hidden": ("0", "model.hidden = 0: ... 1"),
    "model.heads": ("0", "model.heads = 0: ... 1"),
    "model.sequence": ("0", "model.sequence = 0: ... 1"),
    "model.vocabulary": ("0", "model.vocabulary = 0: ... 1"),
    "model.dropout": ("1", "model.dropout = 1.0: ... 0 ... 1"),
    "model.kind": ("t5", "model.kind: ... 'qwen2' or 'bert', not 't5'"),
    "train.steps": ("0", "train.steps = 0: ... 1"),
    "train.batch": ("0", "train.batch = 0: ... 1"),
    "train.warmup": ("-1", "train.warmup = -1: ... 0"),
    "train.decay_steps": ("0", "train.decay_steps = 0: ... 1"),
    "train.learning_rate": ("nan", "train.learning_rate = nan: ... 0"),
    "train.weight_decay": ("-0.1", "train.weight_decay = -0.1: ... 0"),
    "train.clip": ("inf", "train.clip = inf: ... 0 ... inf"),
    "train.backend": ("torch", "train.backend: ... 'numpy' or 'cupy', not 'torch'"),
    "train.tf32": ("true", "train.tf32 = true: ... train.backend = cupy ... dtype = float32"),
    "train.cuda_graph": ("true", "train.cuda_graph = true: ... train.backend = cupy; ... false"),
    "train.fused_gelu": (
        "true",
        "train.fused_gelu = true: ... gpt2 ... model.gelu = tanh",
    ),
    "checkpoint.every": ("-1", "checkpoint.every = -1: ... 0"),
    "checkpoint.keep": ("0", "checkpoint.keep = 0: ... 1"),
    "run.watchdog_s": ("0", "run.watchdog_s = 0.0: ... 0.1"),
}


# The first or last value that is taken, and the one beyond it that is not.
EDGES = {
    "seed": [("0", "-1"), (str(2**64 - 1), str(2**64))],
    "model.dropout": [("0", "-0.01"), ("0.99", "1")],
    "parallel.bucket_mb": [("0", "-0.1"), ("1e9", "inf")],
    "train.warmup": [("0", "-1")],
    "train.learning_rate": [("0", "-1e-9"), ("1e9", "inf")],
    "train.weight_decay": [("0", "-1e-9"), ("1e9", "inf")],
    "train.clip": [("0", "-1e-9"), ("1e9", "inf")],
    "train.max_minutes": [("0", "-0.1"), ("1e9", "inf")],
    "guard.loss_spike_sigma": [("0", "-0.1"), ("1e9", "inf")],
    "guard.replicas_every": [("0", "-1")],
    "guard.abft_every": [("0", "-1")],
    "checkpoint.every": [("0", "-1")],
    "checkpoint.keep": [("1", "0")],
    "trace.sync_every": [("1", "0")],
    "run.watchdog_s": [("0.1", "0.09"), ("0.9e9", "1e9")],
}


@pytest.mark.parametrize(
    ("key", "good", "bad"), [(key, *pair) for key, pairs in EDGES.items() for pair in pairs]
)
def test_a_range_ends_where_it_says(key, good, bad):
    resolve(load(None, [f"--{key}", good]), 1)
    (said,) = problems(f"--{key}", bad)
    assert said.startswith(f"{key} = ")


@pytest.mark.parametrize("key", RULES)
def test_a_value_out_of_range_is_refused(key):
    value, line = RULES[key]
    (said,) = problems(f"--{key}", value)
    assert re.match(elided(line), said)


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("kv_heads", "1", "0"),
        ("ffn", "1", "0"),
        ("norm_epsilon", "0", "-1e-9"),
        ("norm_epsilon", "0.9", "1"),
        ("rope_theta", "1", "0.9"),
        ("rope_theta", "1e9", "inf"),
    ],
)
def test_a_range_of_llama_ends_where_it_says(key, good, bad):
    resolve(load(None, ["--model.kind", "llama", f"--model.{key}", good]), 1)
    (said,) = problems("--model.kind", "llama", f"--model.{key}", bad)
    assert said.startswith(f"model.{key} = ")


LLAMA = ["--model.kind", "llama", "--model.kv_heads", "16"]
SCALING = "{ factor = 8, low = 1, high = 4, original = 8192 }"
FORMS = {
    SCALING.replace("high", "beta"): "must have factor, low, high, original and nothing else",
    SCALING.replace("8,", "0.5,"): "factor must be at least 1",
    SCALING.replace("low = 1", "low = 4"): "0 < low < high",
    SCALING.replace("8192", "0"): "original must be a number of tokens",
}


@pytest.mark.parametrize("scaling", FORMS)
def test_a_form_of_rotary_positions_that_is_not_known_is_refused(scaling):
    resolve(load(None, [*LLAMA, "--model.rope_scaling", SCALING]), 1)
    (said,) = problems(*LLAMA, "--model.rope_scaling", scaling)
    assert said.startswith("model.rope_scaling = ") and FORMS[scaling] in said


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--model.kv_heads", "16"], "model.kv_heads = 16: of model.kind = llama or qwen2 "),
        (["--model.rope_theta", "5e5"], "model.rope_theta = 500000.0: of model.kind = llama"),
        (["--model.kind", "llama", "--model.gelu", "exact"], "model.gelu = exact: of model.kind"),
        ([*LLAMA, "--model.heads", "24", "--model.kv_heads", "16"], "model.heads = 24 does not"),
        (["--model.kind", "llama", "--model.heads", "128"], "model.hidden / model.heads = 3: "),
        (["--model.padding", "3"], "model.padding = 3: of model.kind = bert alone"),
        (
            ["--model.kind", "bert", "--model.vocabulary", "30", "--model.padding", "29"],
            "model.padding = 29: must be below 29",
        ),
        (
            ["--model.kind", "bert", "--parallel.split", '{ m = "x", k = "y z" }'],
            "parallel.split.k = y z: a head of model.kind = bert takes one axis",
        ),
    ],
)
def test_what_a_family_does_not_have_is_refused(words, line):
    said, *_ = problems(*words)
    assert said.startswith(line)


@pytest.mark.parametrize(("kv_heads", "y"), [(1, 8), (2, 8), (4, 4), (8, 4), (24, 8)])
def test_heads_of_keys_divide_over_ranks_or_divide_these(kv_heads, y):
    words = sized({"--model.kind": "llama", "--model.kv_heads": kv_heads}, "--mesh.y", str(y))
    assert resolve(load(None, words), y).model.kv_heads == kv_heads


def test_a_decay_that_ends_within_the_warm_up_is_refused():
    (said,) = problems("--train.decay_steps", "1")
    assert re.fullmatch(elided("train.decay_steps = 1: ... train.warmup = 2"), said)
    assert load(None, ["--train.decay_steps", "2"]).train.decaying() == 2


SIZES = {"--model.hidden": 144, "--model.heads": 24, "--train.batch": 144}
ON_2_2_2 = ["--mesh.x", "2", "--mesh.y", "2", "--mesh.z", "2"]


def sized(changes, *more):
    flat = [str(part) for item in {**SIZES, **changes}.items() for part in item]
    return [*flat, *more]


@pytest.mark.parametrize(
    ("changes", "mesh", "lines"),
    [
        (
            {"--train.batch": 142, "--model.sequence": 3},
            {"x": 2, "y": 4},
            ["train.batch x model.sequence = 426 ... axes x 2 x y 4 = 8"],
        ),
        (
            {"--train.batch": 142},
            {"x": 2, "z": 4},
            ["train.batch = 142 ... axes x 2 x z 4 = 8"],
        ),
        ({"--model.heads": 18}, {"y": 4, "x": 2}, ["model.heads = 18", "axes y 4 = 4"]),
        (
            {"--model.kind": "llama", "--model.kv_heads": 6, "--model.ffn": 180},
            {"y": 8},
            [
                "model.kv_heads = 6 ... axes y 8 = 8 ... 8: use 4 or 8",
                "model.ffn = 180 ... axes y 8 = 8: use ... 8",
            ],
        ),
        (
            {"--model.kind": "qwen2", "--model.heads": 36, "--model.kv_heads": 9},
            {"x": 2, "y": 2, "z": 2},
            ["model.kv_heads = 9 ... axes y 2 = 2 ... 2: use 6 or 12"],
        ),
        (
            {"--model.hidden": 150, "--model.heads": 25},
            {"z": 8},
            ["model.hidden = 150 ... axes z 8 = 8: use ... 8"],
        ),
        (
            {"--model.hidden": 150, "--model.heads": 25},
            {"x": 8},
            ["model.hidden = 150 ... axes x 8 = 8: use ... 8"],
        ),
        (
            {"--model.heads": 25},
            {"x": 8},
            ["model.hidden = 144 ... model.heads = 25:"],
        ),
    ],
)
def test_a_size_that_does_not_divide_names_key_and_axes(changes, mesh, lines):
    axes = [word for axis, size in mesh.items() for word in (f"--mesh.{axis}", str(size))]
    said = problems(*sized(changes, *axes))
    assert all(any(re.search(elided(line), one) for one in said) for line in lines)
    keys = ["train.batch", "train.batch x model.sequence"]
    keys += [f"model.{size}" for size in ("heads", "kv_heads", "hidden", "ffn")]
    assert all(one.split(" = ")[0] in keys for one in said)


PIPELINES = [
    ({"mesh.p": 4}, "mesh.p = 4: 4 ... model.layers = 3: ... 3"),
    (
        {"mesh.p": 2, "parallel.chunks": 2, "parallel.schedule": "zb-v"},
        "mesh.p = 2 x parallel.chunks = 2: 4 ... model.layers = 3: ... 3 parts",
    ),
    (
        {"mesh.p": 2, "parallel.layers_per_stage": "[1, 1, 1]"},
        "parallel.layers_per_stage ... 3 ... 2",
    ),
    (
        {"mesh.p": 2, "parallel.layers_per_stage": "[1, 1]"},
        "parallel.layers_per_stage = [1, 1]: 2 ... model.layers = 3:",
    ),
    (
        {"mesh.p": 2, "parallel.schedule": "none"},
        "mesh.p = 2: schedule none ... 1f1b or mesh.p = 1",
    ),
    (
        {"mesh.p": 2, "parallel.schedule": "1f2b"},
        "parallel.schedule = '1f2b': ... 1f1b? ... none, gpipe",
    ),
    (
        {"mesh.p": 2, "parallel.schedule": "csv:nowhere.csv"},
        "parallel.schedule = csv:nowhere.csv: nowhere.csv: ... CSV file",
    ),
    (
        {"mesh.p": 2, "parallel.chunks": 2, "model.layers": 4},
        "parallel.chunks = 2: schedule 1f1b wants 1",
    ),
    (
        {
            "mesh.p": 3,
            "parallel.microbatches": 2,
            "parallel.schedule": "interleaved",
            "model.layers": 6,
        },
        "parallel.microbatches = 2: schedule interleaved ... 3",
    ),
    (
        {"mesh.p": 2, "parallel.microbatches": 5},
        "train.batch = 144 ... parallel.microbatches = 5: use ... 5",
    ),
    (
        {"mesh.p": 2, "mesh.d": 4, "parallel.microbatches": 48},
        "train.batch / parallel.microbatches = 3 ... axes d 4 = 4",
    ),
    (
        {"mesh.d": 2, "parallel.zero": 2, "parallel.scheme": "3d-broadcast"},
        "parallel.zero = 2: ... (scheme 3d-broadcast); ... 3d",
    ),
    (
        {"mesh.d": 2, "parallel.zero": 2, "parallel.split": '{ m = "x", own = "x" }'},
        "parallel.zero = 2: ... (parallel.split); ... parallel.zero = 1 or 3",
    ),
    (
        {"mesh.d": 32, "parallel.zero": 3, "train.batch": 160},
        "model.hidden = 144 ... axes d 32 = 32: use ... 32",
    ),
    (
        {"mesh.p": 2, "parallel.schedule": "pipedream", "model.tied": "false"},
        "train.clip = 1.0: ... pipedream ... train.clip = 0",
    ),
    (
        {"mesh.p": 2, "parallel.schedule": "pipedream", "train.clip": 0},
        "model.tied = true: ... pipedream ... model.tied = false",
    ),
]


@pytest.mark.parametrize(("changes", "line"), PIPELINES)
def test_a_pipeline_that_does_not_fit_is_refused(changes, line):
    changes = {"model.layers": 3, "mesh.x": 1, "mesh.y": 1, "mesh.z": 1, **changes}
    ranks = changes.get("mesh.p", 1) * changes.get("mesh.d", 1)
    said = problems(*sized({f"--{key}": value for key, value in changes.items()}), ranks=ranks)
    assert len(said) == 1 and re.match(elided(line), said[0])


@pytest.mark.parametrize("inner", [1, 2])
@pytest.mark.parametrize(("changes", "line"), PIPELINES)
def test_the_line_is_the_same_where_the_cuboid_is_left_open(changes, line, inner):
    if " axes " in line:
        return  # another cuboid might do
    sizes = {"model.layers": 3, **changes}
    ranks = sizes.get("mesh.p", 1) * sizes.get("mesh.d", 1) * inner
    said = problems(*sized({f"--{key}": value for key, value in sizes.items()}), ranks=ranks)
    assert len(said) == 1 and re.match(elided(line), said[0])


def test_a_stage_of_less_than_no_layers_is_refused():
    (said,) = problems("--mesh.p", "2", "--parallel.layers_per_stage", "[3, -1]", ranks=2)
    assert re.match(elided("parallel.layers_per_stage = [3, -1]: ... -1 ... 0"), said)


def test_an_asynchronous_run_has_a_longest():
    how = "--mesh.p 2 --parallel.schedule pipedream-2bw --parallel.microbatches 2 --train.steps"
    resolve(load(None, [*how.split(), "12500"]), 2)
    (said,) = problems(*how.split(), "12501", ranks=2)
    assert said.startswith("train.steps = 12501: schedule pipedream-2bw") and "12500" in said


def test_chunks_are_what_the_schedule_wants():
    def chunks(schedule, *more):
        how = ["--model.layers", "8", "--mesh.p", "2", "--parallel.microbatches", "2", *more]
        return resolve(load(None, [*how, "--parallel.schedule", schedule]), 2).parallel.chunks

    assert [chunks(name) for name in ("1f1b", "zb-v", "interleaved")] == [1, 2, 2]
    assert chunks("interleaved", "--parallel.chunks", "4") == 4


def test_the_schedule_is_1f1b_on_several_stages():
    sizes = ["--model.layers", "3", "--mesh.x", "1", "--mesh.y", "1", "--mesh.z", "1"]
    one, two = (resolve(load(None, [*sizes, "--mesh.p", str(p)]), p) for p in (1, 2))
    assert (one.parallel.schedule, two.parallel.schedule) == ("none", "1f1b")
    assert two.layers() == [range(1), range(1, 3)]


def test_a_wrong_number_of_ranks_names_each_factor():
    (said,) = problems(*sized({}, "--mesh.d", "3", *ON_2_2_2), ranks=64)
    line = "mesh: d 3 x x 2 x y 2 x z 2 = 24 ranks, ... 64 ... [mesh] ... 24"
    assert re.fullmatch(elided(line), said)


def test_an_axis_that_the_scheme_does_not_use_is_refused():
    (said,) = problems(*sized({}, *ON_2_2_2, "--parallel.scheme", "2d"))
    assert re.fullmatch(elided("mesh.z = 2: ... z; ... 1"), said)


def test_a_model_that_fits_no_cuboid_says_what_to_set():
    (said,) = problems(*sized({}), ranks=7)
    assert re.match("mesh: .* 7 ranks .* 3d: .* mesh.x, mesh.y .* mesh.z", said)


@pytest.mark.parametrize(
    ("letters", "line"),
    [
        ('{ m = "x", o = "y" }', "parallel.split.o: ... m, n, k, replicate"),
        ('{ m = "w" }', "parallel.split.m: ... 'w'; ... x, y and z"),
        ('{ m = "x", n = "x" }', "parallel.split: axis x ... one ... twice"),
        (
            '{ m = "x", defer = "x" }',
            "parallel.split.defer: ... m, n,",
        ),
        ('{ m = "x", own = "y" }', "parallel.split.own: axis y ... m, n"),
        (
            '{ n = "y", own = "y", panels = "y" }',
            "parallel.split: axis y ... own ... panels",
        ),
        ('{ m = "x y", panels = "y x" }', "parallel.split.panels = y x:"),
    ],
)
def test_a_split_of_letters_is_checked(letters, line):
    (said,) = problems("--parallel.split", letters)
    assert re.match(elided(line), said)


def test_a_split_of_letters_is_taken():
    config = resolve(load(None, sized({}, "--parallel.split", '{ m = "x" }')), 8)
    assert config.splits()["dense"].m == "x"
    assert config.mesh.sizes()["x"] == 8


@pytest.mark.parametrize("ranks", [*range(1, 71), 100, 128])
def test_the_default_model_settles_on_any_number_of_ranks(ranks):
    config = resolve(load(None, []), ranks, default=True)
    assert prod(config.mesh.sizes().values()) == ranks
    assert config.model.hidden % config.model.heads == 0
    assert not violations(config, ranks)


def test_a_default_that_the_user_changed_does_not_grow():
    changed = load(None, ["--model.hidden", "128"])
    with pytest.raises(ValueError, match=r"mesh: .* 7 ranks"):
        resolve(changed, 7, default=True)
    default = with_epsilon(Config().model)
    assert resolve(load(None, []), 64, default=True).model == default


def test_the_best_cuboid_moves_the_fewest_words():
    """[MK (n-1) + KN (m-1) + MN (k-1)] / P for the four products of a block, by hand."""

    def by_hand(config):
        sizes, hidden = config.mesh.sizes(), config.model.hidden
        m, n, k = sizes["x"], sizes["y"], sizes["z"]
        rows, total = config.train.batch * config.model.sequence, 0
        for width, height, (a, b) in (
            (hidden, 3 * hidden, (n, k)),
            (hidden, hidden, (k, n)),
            (hidden, 4 * hidden, (n, k)),
            (4 * hidden, hidden, (k, n)),
        ):
            total += rows * width * (a - 1) + width * height * (m - 1) + rows * height * (b - 1)
        return total / (m * n * k)

    def on(x, y, z):
        return resolve(load(None, sized({"--mesh.x": x, "--mesh.y": y, "--mesh.z": z})), x * y * z)

    best = resolve(load(None, sized({})), 8)
    cuboids = [on(x, y, 8 // (x * y)) for x in (1, 2, 4, 8) for y in (1, 2, 4, 8) if x * y <= 8]
    assert by_hand(best) == min(map(by_hand, cuboids)) < max(map(by_hand, cuboids))
    assert [received_elements(config) for config in cuboids] == pytest.approx(
        list(map(by_hand, cuboids))
    )
