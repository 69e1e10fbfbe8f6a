"""Offloading to host memory does not change values, and every copy is counted."""

import errno
import os
import resource
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

import hpc3d.trace
from hpc3d.arrays.host_store import FileStore, walk
from hpc3d.arrays.pool import OFFLOADED, Pool
from hpc3d.comm.mesh import NullRecorder
from hpc3d.comm.threads import run
from hpc3d.predict.simulation.count import every_rank
from hpc3d.trace.schema import CATEGORY
from tests.pipeline.mixes import config_of, train, trainer_of
from tests.predict.simulation.test_count import counted
from tests.runs import newest
from tests.strided import strided

COPY = CATEGORY.index("copy")
TRACE = NullRecorder()
ALL = """'offload=["optimizer","activations","parameters"]'"""
LINES = """
microbatches=2
p=2 d=2 schedule=1f1b microbatches=4 zero=1
d=2 x=2 scheme=1d zero=3 microbatches=2 optimizer=lion
d=2 x=2 y=2 z=2 schedule=none microbatches=2 dtype=bfloat16 keep_dtype=int8
p=2 x=2 schedule=zb-h1 microbatches=3 scheme=1d optimizer=muon recompute='["mlp"]'
d=2 x=2 scheme=1d optimizer=adamw-8bit hidden=512 heads=8 layers=1 batch=8 dtype=float32
p=2 d=2 schedule=zb-v chunks=2 microbatches=4 zero=2 attention=chunked
e=2 d=2 microbatches=2 experts=4 top_k=2 zero=1 dtype=float16
""".strip().splitlines()


def store_of(pool=None):
    return FileStore(pool or Pool())


@pytest.mark.parametrize("dtype", ["float32", "uint8", "bfloat16"])
def test_saved_arrays_are_restored_and_copies_are_counted(dtype):
    pool = Pool()
    store = store_of(pool)
    arrays = [np.random.default_rng(n).integers(0, 9, (n, 7)).astype(dtype) for n in (1, 3000, 5)]
    kept = [store.empty(array.shape, dtype) for array in arrays]
    for array, place in zip(arrays, kept, strict=True):
        store.save(array, place, TRACE)
    for array, place in zip(arrays, kept, strict=True):
        assert (store.load(place, "workspace", TRACE)() == array).all()
    size = sum(array.nbytes for array in arrays)
    assert store.copied == 2 * size and pool.live[OFFLOADED] == size
    assert pool.held == 0 and pool.peak["all"] <= max(array.nbytes for array in arrays)


def test_offload_file_space_is_reused():
    store = store_of()
    for _ in range(20):
        kept = store.empty((1 << 16,), "float32")
        del kept
    assert store.files.size == 1 << 18


def test_slice_of_an_offloaded_array_is_read_in_place(monkeypatch):
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *words: asked.append(words[1:3]))
    store = store_of()
    store.empty((100,), "uint8").fill(1)
    kept = store.empty((4000,), "float32")
    kept[...] = range(4000)
    start = store.files.offsets[kept.ctypes.data]
    part = store.load(kept[1000:1500], "workspace", TRACE)()
    assert asked == [(start + 4000, 2000)] and part.tolist() == [*range(1000, 1500)]
    assert (
        np.frombuffer(os.pread(store.files.file, 2000, start + 4000), "float32").tolist()
        == part.tolist()
    )


def test_walk_writes_modified_blocks_back():
    store = store_of()
    states = store.empty((10,), "float64")
    states.fill(0)
    units = [[states[:4]], [states[4:]]]
    for number, (state,) in enumerate(walk(store, units, TRACE), 1):
        state += number
    assert states.tolist() == [1] * 4 + [2] * 6
    assert [*walk(store, [], TRACE)] == []


def test_full_disk_error_names_the_folder(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device.* TMPDIR .*: '/") as raised:
        store_of().empty((1,), "float32")
    assert raised.value.filename


STASHED = "p=2 schedule=pipedream microbatches=2 clip=0 tied=false batch=24"
OWNED = "x=4 scheme=3d-broadcast schedule=none microbatches=2"  # some ranks own no matrix
CASES = [
    *((line, ALL) for line in [*LINES, OWNED]),
    (STASHED, """'offload=["optimizer","activations"]'"""),
]


@pytest.mark.parametrize(("line", "moved"), strided(CASES, 6))
def test_offloading_does_not_change_the_training_results(line, moved):
    plain, found = (
        run(config.sizes(), lambda mesh, config=config: train(mesh, config))
        for config in (config_of(line), config_of(f"{line} {moved}"))
    )
    for ours, theirs in zip(found, plain, strict=True):
        assert ours.totals == theirs.totals
        for name, (_, block) in ours.weights.items():
            assert (block == theirs.weights[name][1]).all(), name


def copies(prediction):
    """Return the number of copies of each size, by phase."""
    rows = prediction.events[prediction.events["category"] == COPY]
    sizes = zip(rows["phase"].tolist(), rows["bytes"].tolist())
    return Counter(size for size in sizes if size[1])


@pytest.mark.parametrize("line", strided([line for line in LINES if "y=2" not in line], 3))
def test_predicted_offload_copies_match_the_counted_ones(line):
    config = config_of(f"{line} {ALL}")
    predicted = every_rank(config, config.model.vocabulary)
    for ours, theirs in zip(predicted, counted(config), strict=True):
        assert copies(ours) == copies(theirs)


def test_each_optimizer_state_byte_is_copied_in_and_out_once():
    config = config_of("microbatches=2 'offload=[\"optimizer\"]'")
    (found,) = counted(config)
    (plain,) = every_rank(config_of("microbatches=2"), config.model.vocabulary)
    sizes = copies(found)
    assert sum(size * count for (_, size), count in sizes.items()) == 2 * plain.peak["optimizer"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("microbatches=2", "optimizer"),
        ("microbatches=3 keep_dtype=int8 attention=chunked", "activations"),
        ("microbatches=2 dtype=bfloat16 recompute=[0] optimizer=muon", "parameters"),
    ],
)
def test_predicted_memory_peaks_match_the_measured_ones(line, what):
    config = config_of(f"{line} 'offload=[\"{what}\"]'")

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        trainer.step(0)
        trainer.step(1)
        return dict(mesh.pool.peak)

    found = run(config.sizes(), rank)
    predicted = every_rank(config, config.model.vocabulary)
    assert found[0][OFFLOADED] > 0
    for ours, theirs in zip(predicted, found, strict=True):
        assert ours.peak == {kind: size for kind, size in theirs.items() if size}


LARGE = "--model.hidden 512 --model.heads 8 --model.layers 4 --model.sequence 32 --train.batch 2"
LIMIT = 330 << 20  # bytes: less than parameters, gradients and states of AdamW beside Python


def limited(out, *words, limit=None):
    """Run one rank whose own memory is limited to a number of bytes."""

    def bound():
        if limit:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    command = [sys.executable, "-m", "hpc3d.train", "gpt-serial", "--train.steps", "3", *words]
    command += ["--run.out", str(out), *LARGE.split()]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    how = {"capture_output": True, "text": True, "env": environment, "timeout": 120}
    return subprocess.run(command, check=False, preexec_fn=bound, **how)


def losses(out):
    with hpc3d.trace.open(newest(out)) as trace:
        return trace.steps["loss"].tolist()


@pytest.mark.slow
def test_offloading_trains_a_model_whose_states_exceed_memory(tmp_path):
    plain = limited(tmp_path / "plain")
    assert plain.returncode == 0, plain.stderr
    short = limited(tmp_path / "short", limit=LIMIT)
    assert short.returncode and "emory" in short.stderr
    for what in ('["optimizer"]', '["optimizer", "activations", "parameters"]'):
        moved = limited(tmp_path / what, "--parallel.offload", what, limit=LIMIT)
        assert moved.returncode == 0, moved.stderr
        assert losses(tmp_path / what) == losses(tmp_path / "plain")
        assert " MB copied per step, " in moved.stdout and " s exposed" in moved.stdout
