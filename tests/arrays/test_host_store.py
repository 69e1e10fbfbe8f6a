"""What is offloaded: nothing changes but where it lies, and every copy is counted."""

import errno
import os
import re
import resource
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from hpc3d.arrays.host_store import FileStore, walk
from hpc3d.arrays.pool import OFFLOADED, Pool
from hpc3d.comm.mesh import NullRecorder
from hpc3d.comm.threads import run
from hpc3d.predict.simulation.count import every_rank
from hpc3d.trace.schema import CATEGORY
from tests.pipeline.mixes import config_of, train
from tests.predict.simulation.test_count import counted
from tests.strided import strided

COPY = CATEGORY.index("copy")
TRACE = NullRecorder()
BOTH = """'offload=["optimizer","activations","parameters"]'"""
LINES = """
microbatches=2
p=2 d=2 schedule=1f1b microbatches=4 zero=1
d=2 x=2 scheme=1d zero=3 microbatches=2 optimizer=lion
d=2 x=2 y=2 z=2 schedule=none microbatches=2 dtype=bfloat16 keep_dtype=int8
p=2 x=2 schedule=zb-h1 microbatches=3 scheme=1d optimizer=muon recompute=[1]
d=2 x=2 scheme=1d optimizer=adamw-8bit hidden=512 heads=8 layers=1 batch=8 dtype=float32
p=2 d=2 schedule=zb-v chunks=2 microbatches=4 zero=2 attention=chunked
e=2 d=2 microbatches=2 experts=4 top_k=2 zero=1 dtype=float16
""".strip().splitlines()


def store_of(pool=None):
    return FileStore(pool or Pool())


@pytest.mark.parametrize("dtype", ["float32", "uint8", "bfloat16"])
def test_what_is_saved_comes_back(dtype):
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


def test_memory_of_the_file_is_used_again():
    store = store_of()
    for _ in range(20):
        kept = store.empty((1 << 16,), "float32")
        del kept
    assert store.files.size == 1 << 18


def test_a_part_of_an_array_is_read_where_it_lies(monkeypatch):
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *words: asked.append(words[1:3]))
    store = store_of()
    store.empty((100,), "uint8").fill(1)
    kept = store.empty((4000,), "float32")
    kept[...] = range(4000)
    start = store.files.places[kept.ctypes.data]
    part = store.load(kept[1000:1500], "workspace", TRACE)()
    assert asked == [(start + 4000, 2000)] and part.tolist() == [*range(1000, 1500)]
    os.lseek(store.files.file.fileno(), start + 4000, os.SEEK_SET)
    assert np.frombuffer(store.files.file.read(2000), "float32").tolist() == part.tolist()


def test_a_walk_keeps_what_was_written():
    store = store_of()
    states = store.empty((10,), "float64")
    states.fill(0)
    units = [[states[:4]], [states[4:]]]
    for number, (state,) in enumerate(walk(store, units, TRACE), 1):
        state += number
    assert states.tolist() == [1] * 4 + [2] * 6
    assert [*walk(store, [], TRACE)] == []


def test_a_full_disk_is_an_error_that_names_the_folder(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device: '/") as raised:
        store_of().empty((1,), "float32")
    assert raised.value.filename


@pytest.mark.parametrize("line", strided(LINES, 3))
def test_a_run_is_the_same_bit_for_bit(line):
    plain, moved = (
        run(config.mesh.sizes(), lambda mesh, config=config: train(mesh, config))
        for config in (config_of(line), config_of(f"{line} {BOTH}"))
    )
    for ours, theirs in zip(moved, plain, strict=True):
        assert ours.totals == theirs.totals
        for name, (_, block) in ours.weights.items():
            assert (block == theirs.weights[name][1]).all(), name


def copies(prediction):
    """How many copies there are of each size, by phase."""
    rows = prediction.events[prediction.events["category"] == COPY]
    sizes = zip(rows["phase"].tolist(), rows["bytes"].tolist())
    return Counter(size for size in sizes if size[1])


@pytest.mark.parametrize("line", strided([line for line in LINES if "y=2" not in line], 3))
def test_predicted_copies_are_counted(line):
    config = config_of(f"{line} {BOTH}")
    predicted = every_rank(config, config.model.vocabulary)
    for ours, theirs in zip(predicted, counted(config), strict=True):
        assert copies(ours) == copies(theirs)


def test_every_byte_of_state_goes_in_once_and_out_once():
    config = config_of("microbatches=2 'offload=[\"optimizer\"]'")
    (found,) = counted(config)
    (plain,) = every_rank(config_of("microbatches=2"), config.model.vocabulary)
    sizes = copies(found)
    assert sum(size * count for (_, size), count in sizes.items()) == 2 * plain.peak["optimizer"]
