"""Values that are rejected, with their error messages."""

import re

import pytest

from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from tests.config.refused import problems, sized
from tests.elided import elided

RULES = {
    "seed": ("-1", "seed = -1: ... 0"),
    "name": ("a/b", "name = 'a/b' ... . _ + -"),
    "mesh.x": ("0", "mesh.x = 0: ... 1"),
    "mesh.d": ("-2", "mesh.d = -2: ... 1"),
    "mesh.p": ("0", "mesh.p = 0: ... 1"),
    "mesh.e": ("2", "mesh.e = 2: ... model.experts > 0; ... change model.experts"),
    "mesh.order": ("x y z", "mesh.order = 'x y z': ... p d c e x y z once, separated by spaces"),
    "mesh.transport": ("tcp", "mesh.transport: ... 'auto', 'mpi', 'nccl' or 'host-staged'"),
    "parallel.scheme": ("4d", "parallel.scheme: ... '1d', '1d-sequence',"),
    "parallel.zero": ("4", "parallel.zero: ... 0, 1, 2 or 3, not 4"),
    "parallel.shard": ("2", "parallel.shard = 2: ... parallel.zero = 1 or 2 or 3; ..."),
    "parallel.local_steps": ("-1", "parallel.local_steps = -1: ... 0"),
    "parallel.outer_learning_rate": ("0.7", "... only valid for parallel.local_steps > 0; ..."),
    "parallel.sync": ("stale", "... only valid for parallel.local_steps > 0; ..."),
    "parallel.outer_momentum": ("1", "parallel.outer_momentum = 1.0: ... 0 ... 1"),
    "parallel.bucket_mb": ("-1", "parallel.bucket_mb = -1.0: ... 0 ... finite"),
    "parallel.microbatches": ("0", "parallel.microbatches = 0: ... 1"),
    "parallel.chunks": ("0", "parallel.chunks = 0: ... 1"),
    "parallel.recompute": ("half", "parallel.recompute: ... 'none', 'selective'"),
    "model.layers": ("0", "model.layers = 0: ... 1"),
    "model.hidden": ("0", "model.hidden = 0: ... 1"),
    "model.heads": ("0", "model.heads = 0: ... 1"),
    "model.sequence": ("0", "model.sequence = 0: ... 1"),
    "model.vocabulary": ("0", "model.vocabulary = 0: ... 1"),
    "model.dropout": ("1", "model.dropout = 1.0: ... 0 ... 1"),
    "model.kind": ("t5", "model.kind: ... 'bert' or 'roberta', not 't5'"),
    "train.steps": ("0", "train.steps = 0: ... 1"),
    "train.batch": ("0", "train.batch = 0: ... 1"),
    "train.warmup": ("-1", "train.warmup = -1: ... 0"),
    "train.decay_steps": ("0", "train.decay_steps = 0: ... 1"),
    "train.learning_rate": ("nan", "train.learning_rate = nan: ... 0"),
    "train.weight_decay": ("-0.1", "train.weight_decay = -0.1: ... 0"),
    "train.clip": ("inf", "train.clip = inf: ... 0 ... finite"),
    "train.backend": ("torch", "train.backend: ... 'numpy' or 'cupy', not 'torch'"),
    "train.tf32": ("true", "train.tf32 = true: ... train.backend = cupy; ..."),
    "train.cuda_graph": ("true", "train.cuda_graph = true: ... train.backend = cupy; ..."),
    "train.fused_gelu": ("true", "train.fused_gelu = true: ... train.backend = cupy; ..."),
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
    "train.beta1": [("0", "-1e-9"), ("0.999", "1")],
    "train.beta2": [("0", "-1e-9"), ("0.999", "1")],
    "train.epsilon": [("1e-30", "1e-31"), ("0.9", "1")],
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
def test_values_at_the_bounds_are_accepted_and_beyond_rejected(key, good, bad):
    resolve(load(None, [f"--{key}", good]), 1)
    (said,) = problems(f"--{key}", bad)
    assert said.startswith(f"{key} = ")


@pytest.mark.parametrize("key", RULES)
def test_value_out_of_range_is_rejected(key):
    value, line = RULES[key]
    (said,) = problems(f"--{key}", value)
    assert re.match(elided(line), said)


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("kv_heads", "1", "0"),
        ("ffn", "1", "0"),
        ("head_dim", "2", "3"),
        ("norm_epsilon", "0", "-1e-9"),
        ("norm_epsilon", "0.9", "1"),
        ("rope_theta", "1", "0.9"),
        ("rope_theta", "1e9", "inf"),
    ],
)
def test_llama_values_at_the_bounds_are_accepted_and_beyond_rejected(key, good, bad):
    resolve(load(None, ["--model.kind", "llama", f"--model.{key}", good]), 1)
    (said,) = problems("--model.kind", "llama", f"--model.{key}", bad)
    assert said.startswith(f"model.{key} = ")


GEMMA2 = ["--model.kind", "gemma2", "--model.score_cap", "1e6", "--model.logit_cap", "1e-6"]
LLAMA = ["--model.kind", "llama", "--model.kv_heads", "16"]
SCALING = "{ factor = 8, low = 1, high = 4, original = 8192 }"
LONGROPE = '{ type = "longrope", factor = 8, original = 64, short = [1, 2, 3], long = [1, 2, 3] }'
FORMS = {
    SCALING.replace("high", "beta"): "keys factor, low, high, original ",
    SCALING.replace("8,", '"yarn",'): "keys factor, low, high, original ",
    SCALING.replace("fa", 'type = "ntk", fa'): "unknown type 'ntk'; use linear, dynamic, llama3, ",
    SCALING.replace("fa", "type = 3, fa"): "unknown type 3.0; use linear, ",
    '{ type = "linear", factor = 8, low = 1 }': "type linear must have the keys factor and no ",
    '{ type = "dynamic", factor = 8 }': "type dynamic must have the keys factor, original and ",
    '{ type = "yarn", factor = 8, slow = 2 }': "original, and optionally fast, slow, attention, ",
    '{ type = "yarn", factor = 8, original = 9, fast = 1 }': "0 < slow < fast must hold",
    '{ type = "yarn", factor = 8, original = 9, attention = 0 }': "attention must be positive",
    SCALING.replace("8,", "inf,"): "factor must be at least 1",
    SCALING.replace("8,", "0.5,"): "factor must be at least 1",
    SCALING.replace("low = 1", "low = 4"): "0 < low < high and ",
    SCALING.replace("8192", "0"): "original, a number of tokens, must be at least 1",
    LONGROPE.replace("long = [1, 2, 3]", "long = 2"): "short and long with a list, the others ",
    LONGROPE.replace("factor = 8", "factor = [8]"): "short and long with a list, the others ",
    LONGROPE.replace(
        "short = [1, ", "short = ["
    ): "short must have 3 positive numbers, one for each pair ",
    LONGROPE.replace("long = [1", "long = [0"): "of a head, not (0.0, 2.0, 3.0)",
    LONGROPE.replace("short", "x" * 99): " ...: type longrope must have the keys ",
    LONGROPE.replace("64", "1"): "type longrope needs an original length of at least 2 tokens",
    SCALING.replace("8,", "[8],"): "type llama3 must have the keys factor, low, high, original ",
}


YARN = '{ type = "yarn", factor = 8, original = 9 }'
YARN_READ = "{'type': 'yarn', 'factor': 8.0, 'original': 9.0}"


@pytest.mark.parametrize("scaling", FORMS)
def test_unknown_rope_scaling_is_rejected(scaling):
    resolve(load(None, [*LLAMA, "--model.rope_scaling", SCALING]), 1)
    (said,) = problems(*LLAMA, "--model.rope_scaling", scaling)
    assert said.startswith("model.rope_scaling = ") and FORMS[scaling] in said


def test_longrope_is_accepted_with_a_divisor_per_pair():
    found = resolve(load(None, [*LLAMA, "--model.rope_scaling", LONGROPE]), 1).model.rope_scaling
    assert found["long"] == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--model.kv_heads", "16"],
            "model.kv_heads = 16: only valid for model.kind = llama or qwen2 or qwen3 or ",
        ),
        (
            ["--model.rope_theta", "5e5"],
            "model.rope_theta = 500000.0: only valid for model.kind = gpt_neox or llama or ",
        ),
        (
            ["--model.kind", "llama", "--model.gelu", "exact"],
            "model.gelu = exact: only valid for model.kind = gpt2 or ",
        ),
        ([*LLAMA, "--model.heads", "24", "--model.kv_heads", "16"], "model.heads = 24 must"),
        (
            ["--model.kind", "llama", "--model.heads", "128"],
            "model.hidden / model.heads = 3 must be even ",
        ),
        (
            ["--model.kind", "phi3", "--model.rope_fraction", "0.5"],
            "model.hidden / model.heads x model.rope_fraction = 3 must be even ",
        ),
        (
            ["--model.kind", "llama", "--model.rope_fraction", "0.5"],
            "model.rope_fraction = 0.5: only valid for model.kind = gpt_neox or phi3; ",
        ),
        (
            [*LLAMA, "--model.rope_theta", "1", "--model.rope_scaling", YARN],
            f"model.rope_scaling = {YARN_READ}: type yarn needs model.rope_theta above 1",
        ),
        (["--model.head_dim", "8"], "model.head_dim = 8: only valid for model.kind = llama or "),
        (
            ["--model.kind", "qwen2", "--model.attention_bias", "true"],
            "model.attention_bias = true: only valid for model.kind = llama",
        ),
        (
            ["--model.kind", "bert", "--model.window", "3"],
            "model.window = 3: only valid for model.kind = gpt2 or ",
        ),
        (
            ["--model.kind", "bert", "--data.boundaries", "true"],
            "data.boundaries = true: only valid for model.kind = gpt2 or ",
        ),
        (["--data.separator", "2"], "data.separator = 2: only valid for data.boundaries = true"),
        (["--data.path", "[]"], "data.path must name at least one text"),
        (["--data.weights", "[2, 1]"], "data.weights = [2.0, 1.0]: data.path has 1 text"),
        (
            ["--data.path", '["a", "b"]', "--data.weights", "[2, 0]"],
            "data.weights = [2.0, 0.0]: each weight must be a positive number",
        ),
        (
            ["--data.path", '["a", "b"]', "--data.weights", "[0.3334, 0.6667]"],
            "data.weights = [0.3334, 0.6667]: integer weights with the same ratio exceed",
        ),
        (
            ["--data.path", '["a", "b"]', "--data.weights", '["2", "1"]'],
            "data.weights[0]: input should be a valid number, not '2'",
        ),
        (
            [*GEMMA2, "--model.score_cap", "1e-320"],
            "model.score_cap = 1e-320: must be from 1e-06 ",
        ),
        (
            [*GEMMA2, "--model.logit_cap", "1e7"],
            "model.logit_cap = 10000000.0: must be from 1e-06",
        ),
        (["--model.global_every", "2"], "model.global_every = 2: only valid for model.window > 0"),
        (
            ["--model.window", "3", "--model.global_every", "1"],
            "model.global_every = 1 gives no block the window model.window = 3; use at least 2",
        ),
        (
            ["--model.padding", "3"],
            "model.padding = 3: only valid for model.kind = bert or roberta; ",
        ),
        (
            ["--model.kind", "bert", "--model.vocabulary", "30", "--model.padding", "29"],
            "model.padding = 29 must be below 29",
        ),
        (
            ["--model.kind", "bert", "--parallel.split", '{ m = "x", k = "y z" }'],
            "parallel.split.k = y z: the head of model.kind = bert ",
        ),
    ],
)
def test_settings_that_a_model_family_lacks_are_rejected(words, line):
    said, *_ = problems(*words)
    assert said.startswith(line)


@pytest.mark.parametrize(("padding", "least"), [([], 2), (["--model.padding", "0"], 3)])
def test_vocabulary_of_only_special_tokens_is_rejected(padding, least):
    words = ["--model.kind", "bert", *padding, "--model.vocabulary"]
    (said,) = problems(*words, f"{least - 1}")
    assert said.startswith(f"model.vocabulary = {least - 1}: model.kind = bert needs at ")
    assert said.endswith(f"; use at least {least}")
    assert load(None, [*words, f"{least}"]).model.vocabulary == least


def test_orthogonalize_is_only_valid_with_muon():
    sharded = ["--train.orthogonalize", "sharded"]
    (said,) = problems("--train.optimizer", "lion", *sharded)
    assert re.match(elided("train.orthogonalize = sharded: ... train.optimizer = muon; ..."), said)
    config = load(None, ["--train.optimizer", "muon", *sharded])
    assert resolve(config, 1).train.orthogonalize == "sharded"


@pytest.mark.parametrize(
    ("optimizer", "key", "users"),
    [
        ("sgd", "beta1", "adamw or adamw-8bit or lion or muon"),
        ("adafactor", "epsilon", "adamw or adamw-8bit or muon"),
        ("lion", "epsilon", "adamw or adamw-8bit or muon"),
    ],
)
def test_key_of_another_optimizer_is_rejected(optimizer, key, users):
    (said,) = problems("--train.optimizer", optimizer, f"--train.{key}", "0.5")
    assert re.match(elided(f"train.{key} = 0.5: ... train.optimizer = {users}; ..."), said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--train.min_learning_rate 0.01", "train.min_learning_rate = 0.01: ... 0.003"),
        ("--train.min_learning_rate -1", "train.min_learning_rate = -1.0: ..."),
        ("--train.product_scale tensor", "train.product_scale = tensor: ... float8; ..."),
        ("--train.cooldown 3", "train.cooldown = 3: ... train.decay = wsd or wsd-linear; ..."),
        ("--train.decay wsd --train.cooldown 19", "train.cooldown = 19: ... 18 of 20 ..."),
    ],
)
def test_invalid_learning_rate_decay_is_rejected(words, said):
    (found,) = problems(*words.split())
    assert re.fullmatch(elided(said), found)


def test_decay_may_span_all_steps_after_warmup():
    words = "--train.decay wsd --train.cooldown 18 --train.min_learning_rate 0.003"
    assert resolve(load(None, words.split()), 8).train.falling() == 18


def test_decay_that_ends_within_warmup_is_rejected():
    (said,) = problems("--train.decay_steps", "1")
    assert re.fullmatch(elided("train.decay_steps = 1 ... train.warmup = 2"), said)
    assert load(None, ["--train.decay_steps", "2"]).train.decaying() == 2


@pytest.mark.parametrize(
    ("letters", "line"),
    [
        ('{ m = "x", o = "y" }', "parallel.split.o: ... m, n, k, replicate"),
        ('{ m = "w" }', "parallel.split.m: ... 'w'; ... x, y and z"),
        ('{ m = "x", n = "x" }', "parallel.split: axis x occurs more than once"),
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
def test_invalid_loop_dimension_split_is_rejected(letters, line):
    (said,) = problems("--parallel.split", letters)
    assert re.match(elided(line), said)


def test_valid_loop_dimension_split_is_accepted():
    config = resolve(load(None, sized({}, "--parallel.split", '{ m = "x" }')), 8)
    assert config.splits["dense"].m == "x"
    assert config.sizes()["x"] == 8
