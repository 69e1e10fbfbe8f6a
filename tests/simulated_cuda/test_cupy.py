"""The program on CuPy with simulated CUDA, compared with the program on NumPy."""

import json
import re
from collections import Counter
from importlib.util import find_spec

import numpy as np
import pytest

import hpc3d.trace
from hpc3d.predict.predicted_step import predicted_step
from hpc3d.trace.checks_per_rank import violations
from tests.cuda import emulator
from tests.mpi import mpirun
from tests.runs import newest
from tests.simulated_cuda.__main__ import WHEEL
from tests.strided import rotating

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not WHEEL.exists() and find_spec("cupy") is None, reason="no CuPy"),
    pytest.mark.skipif(emulator.compiler() is None, reason="no g++"),
]
TINY = {
    "model.layers": 2,
    "model.hidden": 32,
    "model.heads": 4,
    "model.sequence": 8,
    "train.batch": 8,
    "train.steps": 3,
    "train.decay": "constant",
    "parallel.bucket_mb": 0.02,  # several
}
SWITCH = {"model__experts": 4, "model__capacity": 0.75}
BALANCED = {**SWITCH, "model__balance_bias": 0.05}
ONE_KEY = {"model__kind": "llama", "model__kv_heads": 1}
MIXTRAL = {"model__kind": "llama", "model__experts": 4, "model__top_k": 2, "model__capacity": 0}
MIXTRAL |= {"model__shared_experts": 1, "parallel__microbatches": 2}
CLOSE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-3}


def run(ranks, out, posted=None, **values):
    """Return the folder of a run with options `section__key`, which must succeed. The operations
    that a rank posted on streams are written to the file `posted`."""
    options = {**TINY, "run.out": out, **{k.replace("__", "."): v for k, v in values.items()}}
    words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    simulated = ["-m", "tests.simulated_cuda", "hpc3d.train"]
    how = simulated if options["train.backend"] == "cupy" else ["-m", "hpc3d.train"]
    environment = {"SIMULATED_DEVICES": str(ranks), "HPC3D_MPI_DEVICE": "full"}
    environment |= {"SIMULATED_POSTED": str(posted)} if posted else {}
    done = mpirun(ranks, *how, *words, timeout=200, environment=environment)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return newest(out)


def told(folder):
    """Return loss and gradient norm of each step, and the communicated bytes by operation."""
    with hpc3d.trace.open(folder) as trace:
        assert violations(trace) == []
        mine, moved = trace.steps["rank"] == 0, Counter()
        for op, size in zip(trace.events["op"].tolist(), trace.events["bytes"].tolist()):
            moved[op] += size
        return np.stack([trace.steps[name][mine] for name in ("loss", "grad_norm")], 1), moved


def weights(folder):
    """Return the SHA-256 digests of the files of the last checkpoint."""
    manifest = folder / "checkpoints" / "step-00000006" / "manifest.json"
    return [file["sha256"] for file in json.loads(manifest.read_text())["files"]]


def peak(folder):
    """Return the peak memory of a rank in the last step."""
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["peak_bytes"]


def predicted_peak(folder):
    found = predicted_step(folder / "config.toml", [], "h100", of_run=True)
    return found.summary["memory"]["worst"]["all"]


def routed(folder):
    """Return the tables of router decisions and of router losses."""
    with hpc3d.trace.open(folder) as trace:
        return np.array(trace.experts), np.array(trace.routers)


@pytest.fixture(scope="module")
def on_numpy(tmp_path_factory):
    """Results of a run on NumPy in float32, computed once."""
    known = {}

    def told_by(ranks=1, **values):
        key = ranks, *sorted(values.items())
        if key not in known:
            out = tmp_path_factory.mktemp("numpy")
            values |= {"train__backend": "numpy", "train__dtype": "float32"}
            known[key] = told(run(ranks, out, **values))
        return known[key]

    return told_by


NUMPY = [
    (1, "float32", {"model__dropout": 0.1, "parallel__microbatches": 2}),
    (1, "float16", {}),
    (1, "bfloat16", {"train__fused_gelu": "true", "parallel__recompute": "full"}),
    (2, "float32", {"mesh__x": 2, "parallel__scheme": "1d-sequence"}),
    (2, "float32", {"mesh__y": 2, "parallel__scheme": "3d-broadcast"}),
    (2, "float32", {"mesh__d": 2, "parallel__zero": 1, "guard__replicas_every": 2}),
    (2, "float16", {"mesh__d": 2, "parallel__zero": 3, "guard__replicas_every": 2}),
    (2, "bfloat16", {"mesh__x": 2, "guard__replicas_every": 2}),
    (2, "bfloat16", {"mesh__p": 2, "parallel__schedule": "1f1b", "parallel__microbatches": 4}),
    (
        2,
        "float32",
        {
            "mesh__p": 2,
            "parallel__schedule": "zb-v",
            "parallel__chunks": 2,
            "parallel__microbatches": 4,
            "model__layers": 4,
        },
    ),
    (2, "float32", {"mesh__e": 2, **BALANCED}),
    (2, "bfloat16", {"mesh__e": 2, **SWITCH}),
    (1, "float16", MIXTRAL),
    (4, "float32", {"mesh__e": 2, "mesh__x": 2, "mesh__transport": "host-staged", **MIXTRAL}),
    (2, "float32", {"mesh__c": 2, "model__dropout": 0.1}),
    (2, "bfloat16", {"mesh__c": 2, "parallel__context": "all-to-all", **ONE_KEY}),
    (2, "float16", {"mesh__c": 2, "model__kind": "llama", "model__kv_heads": 2}),
    (
        4,
        "float32",
        {"mesh__c": 4, "parallel__context": "both", "parallel__ulysses": 2},
    ),
    (4, "float32", {"mesh__c": 2, "mesh__d": 2, "mesh__transport": "host-staged"}),
    (4, "float32", {"mesh__x": 2, "mesh__y": 2, "parallel__scheme": "2d-summa"}),
    (4, "float32", {"mesh__x": 2, "mesh__z": 2, "mesh__transport": "host-staged"}),
    (4, "float32", {"mesh__y": 2, "mesh__d": 2, "mesh__transport": "mpi"}),
]


def _id(case):
    ranks, dtype, values = case
    return f"{ranks}-{dtype}-{' '.join(map(str, values.values()))}"


@pytest.mark.parametrize(
    ("ranks", "dtype", "values"),
    [
        pytest.param(*case, id=_id(case), marks=rotating(day) if day else [])
        for day, case in enumerate(NUMPY)
    ],
)
def test_cupy_training_matches_numpy(ranks, dtype, values, on_numpy, tmp_path):
    """Tests losses and norms, and, with the same type, all counted bytes."""
    got, moved = told(run(ranks, tmp_path, train__backend="cupy", train__dtype=dtype, **values))
    own = {key: value for key, value in values.items() if "fused" not in key}
    expected, counted = on_numpy(ranks, **{k: v for k, v in own.items() if "transport" not in k})
    np.testing.assert_allclose(got[:, 0], expected[:, 0], rtol=CLOSE[dtype])
    np.testing.assert_allclose(got[:, 1], expected[:, 1], rtol=20 * CLOSE[dtype])
    if dtype == "float32":
        assert moved == counted


@pytest.mark.parametrize(
    "values",
    [
        {"mesh__x": 2, "parallel__scheme": "1d-sequence", "parallel__microbatches": 2},
        {"mesh__p": 2, "parallel__schedule": "1f1b", "parallel__microbatches": 4},
        {"mesh__d": 2, "parallel__zero": 1, "mesh__transport": "host-staged"},
    ],
    ids=["1d-sequence", "1f1b", "ZeRO"],
)
def test_cupy_training_without_a_trace_matches_numpy(values, on_numpy, tmp_path):
    """A trace synchronizes streams and keeps arrays alive; results must not depend on this."""
    how = {"train__dtype": "float32", "train__backend": "cupy", "trace__enabled": "false"}
    log = (run(2, tmp_path, **values, **how) / "train.log").read_text()
    rows = re.findall(r"^ +\d+ +(\d+\.\d{4}) +\S+ +(\d+\.\d{4})", log, re.MULTILINE)
    expected, _ = on_numpy(2, **{k: v for k, v in values.items() if "transport" not in k})
    np.testing.assert_allclose(np.array(rows, float), expected, rtol=0, atol=2e-4)


PIPELINE = {"mesh__p": 2, "parallel__microbatches": 4}
CHUNKS = {"parallel__chunks": 2, "model__layers": 4}
HALF = {"model__dropout": 0.1, "train__dtype": "float16"}
GRAPHS = [
    (1, {"parallel__attention": "chunked"}),
    (2, {"mesh__d": 2, "parallel__zero": 1}),
    (1, {}),
    (2, {"mesh__e": 2, **BALANCED}),
    (2, {"mesh__c": 2, "parallel__context": "all-to-all"}),
    (1, MIXTRAL | {"model__capacity": 2}),
    (2, PIPELINE | {"parallel__schedule": "1f1b"}),
    (2, PIPELINE | {"parallel__schedule": "gpipe", **HALF}),
    (2, PIPELINE | {"parallel__schedule": "zb-h1", "model__tied": "false"}),
    (2, PIPELINE | {"parallel__schedule": "zb-v", **CHUNKS}),
    (2, PIPELINE | {"parallel__schedule": "interleaved", **CHUNKS}),
    (4, PIPELINE | {"parallel__schedule": "1f1b", "mesh__d": 2, "parallel__zero": 1}),
    (2, {"mesh__c": 2, "parallel__microbatches": 2}),
    (2, {"mesh__c": 2, "model__kind": "llama", "model__kv_heads": 2, "model__dropout": 0.1}),
    (2, {"mesh__d": 2, "parallel__zero": 3, "parallel__prefetch": "true"}),
]


@pytest.mark.parametrize(
    ("ranks", "values"),
    [pytest.param(*case, marks=rotating(day)) for day, case in enumerate(GRAPHS)],
)
def test_cuda_graph_step_matches_the_launched_step(ranks, values, tmp_path):
    plain, graph = tmp_path / "plain", tmp_path / "graph"
    values = {"train__dtype": "float32", **values, "train__backend": "cupy", "train__steps": 6}
    values |= {"checkpoint__every": 6}
    right = run(ranks, plain, **values)
    replayed = run(ranks, graph, tmp_path / "posted", train__cuda_graph="true", **values)
    np.testing.assert_array_equal(told(replayed)[0], told(right)[0])
    assert weights(replayed) == weights(right)
    if values["train__dtype"] == "float32":
        assert peak(replayed) == predicted_peak(replayed)
    assert "CUDA graph: one launch" in (replayed / "train.log").read_text()
    for got, expected in zip(routed(replayed), routed(right), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert json.loads((tmp_path / "posted").read_text())["graph"] > 2


def test_number_of_launches_per_layer(tmp_path):
    """There are 26 launches besides attention, including those of CuPy itself."""

    def counted(layers, steps):
        posted = tmp_path / "posted"
        values = {"model__layers": layers, "train__steps": steps, "train__dtype": "bfloat16"}
        run(1, tmp_path / "runs", posted, train__backend="cupy", **values)
        return Counter(json.loads(posted.read_text()))

    layer = counted(3, 2) - counted(3, 1) - (counted(2, 2) - counted(2, 1))
    del layer["event"]
    attention = {name: count for name, count in layer.items() if "softmax" in name}
    attention |= {name: count for name, count in layer.items() if "cupy_copy" in name}
    assert sum(attention.values()) == 2 + 5
    products = 6  # of attention, where it is made of products
    assert sum((layer - Counter(attention)).values()) - products == 26


@pytest.mark.parametrize("first", ["numpy", "cupy"])
def test_checkpoint_resumes_on_the_other_backend(first, on_numpy, tmp_path):
    values = {"train__dtype": "float32", "checkpoint__every": 2}
    second = {"numpy": "cupy", "cupy": "numpy"}[first]
    begun = run(1, tmp_path, train__backend=first, train__steps=2, **values)
    words = ["--resume", begun, "--train.backend", second, "--train.steps", 3]
    done = mpirun(1, "-m", "tests.simulated_cuda", "hpc3d.train", *words, timeout=200)
    assert done.returncode == 0, done.stderr
    got, _ = told(newest(tmp_path))
    expected, _ = on_numpy()
    np.testing.assert_allclose(got, expected[-len(got) :], rtol=1e-5)


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=rotating(day))
        for day, part in enumerate(
            ["loader", "kernels", "sizes", "products", "attention", "layers", "nccl", "rates"]
        )
    ],
)
def test_gpu_check_passes_on_fake_cupy(part, tmp_path):
    """Runs the parts of `make gpu-check` that are fast enough."""
    events = tmp_path / "events"
    events.touch()
    words = ["-m", "tests.simulated_cuda", "tests.gpu.child", part, events, "--quick"]
    done = mpirun(1, *words, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    ends = [
        event
        for event in map(json.loads, events.read_text().splitlines())
        if event["event"] == "end"
    ]
    assert [event for event in ends if event["outcome"] == "failed"] == []
    assert sum(event["outcome"] == "passed" for event in ends) >= 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_offloading_does_not_change_the_losses(ranks, tmp_path):
    how = {"train__backend": "cupy", "mesh__d": ranks, "parallel__microbatches": 2}
    plain, moved = [
        run(ranks, tmp_path / name, **how, **options)
        for name, options in {
            "plain": {},
            "moved": {"parallel__offload": '["optimizer", "activations"]'},
        }.items()
    ]
    assert (told(moved)[0] == told(plain)[0]).all()
    with hpc3d.trace.open(moved) as trace:
        copies = trace.events["bytes"][trace.events["stream"] == 4]
        assert copies.sum() > 0
