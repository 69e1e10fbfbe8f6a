"""Sizes of gradient buckets: chosen by the machine model, the same in runs and predictions."""

from dataclasses import replace

import pytest

from hpc3d.comm.communicator import received_share
from hpc3d.config.input_file import BUCKET_MB
from hpc3d.config.package_data import default_machine
from hpc3d.predict.bucket_size import bucket_mb, with_bucket_size, with_bucket_size_of_run
from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.planning.candidates import Candidates
from hpc3d.predict.planning.estimate import Estimator
from hpc3d.predict.planning.layouts import MEMORY_OPTIONS, bare
from hpc3d.predict.planning.ranking import layout
from hpc3d.predict.simulation.simulator import load_resolved, simulate
from tests.predict.fixed import MACHINE

# Blocks with 25e9 weights, whose gradients have 100 GB.
LARGE = "model.layers=32 model.hidden=8192 model.heads=64 train.batch=4096 model.vocabulary=1024"
SIZES = 1, 2, 8, 64, 1024, 4096


def sized(words, **more):
    words = [*words.split(), *(f"{key}={value}" for key, value in more.items())]
    return load_resolved(None, [f"--{word}" for word in words])


def replicated(d, zero=0, model=LARGE):
    return sized(f"{model} mesh.d={d} mesh.x=1 parallel.zero={zero}")


def latency(config, machine, size):
    """Return the fraction of a bucket's reduction time that is latency."""
    op, count = ("reduce_scatter", "all_reduce")[not config.parallel.zero], config.mesh.d
    nbytes, members = 1e6 * size * received_share(op, count), range(count)
    per_byte = machine.call(op, 1e6 * nbytes, members) / (1e6 * nbytes)
    return 1 - nbytes * per_byte / machine.call(op, nbytes, members)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("machine", [MACHINE, load(default_machine())], ids=lambda m: m.name)
def test_buckets_grow_until_latency_is_two_fifths_of_a_reduction(machine, zero):
    found = [bucket_mb(replicated(d, zero), machine) for d in SIZES]
    assert found == sorted(found) and found[:3] == [BUCKET_MB] * 3
    logarithmic = machine is MACHINE and not zero  # the latency of an all-reduce
    assert (found[-1] >= 4 * BUCKET_MB) != logarithmic
    for d, size in zip(SIZES[1:], found[1:]):
        config = replicated(d, zero)
        assert latency(config, machine, size) <= 0.4 + 1e-3
        assert size == BUCKET_MB or latency(config, machine, size / 2) > 0.4


def test_slower_links_have_larger_buckets():
    slow = replace(MACHINE, links=tuple(replace(x, alpha_s=8 * x.alpha_s) for x in MACHINE.links))
    config = replicated(1024, zero=1)
    assert bucket_mb(config, slow) >= 4 * bucket_mb(config, MACHINE)


def test_stage_has_at_least_four_buckets():
    small = "model.layers=8 model.hidden=1024 model.heads=8 train.batch=4096"
    gradient = 4 * 8 * 12 * 1024**2 / 1e6
    for stages in (1, 2):
        config = sized(f"{small} mesh.d=4096 mesh.x=1 mesh.p={stages} parallel.zero=1")
        assert BUCKET_MB < bucket_mb(config, MACHINE) <= gradient / stages / 4


def test_input_file_overrides_the_default():
    config = sized(f"{LARGE} mesh.d=4096 mesh.x=1 parallel.bucket_mb=3")
    assert with_bucket_size(config, MACHINE).parallel.bucket_mb == 3
    assert with_bucket_size_of_run(config).parallel.bucket_mb == 3


TINY = "model.layers=4 model.hidden=64 model.heads=8 train.batch=64 mesh.x=1"


def test_simulation_and_plan_use_the_chosen_size(monkeypatch):
    """Tiny gradients never justify more than 25 MB, so the minimum is reduced here."""
    monkeypatch.setattr("hpc3d.predict.bucket_size.BUCKET_MB", 1e-3)
    config = sized(f"{TINY} mesh.d=16 parallel.zero=1 train.dtype=float32")
    size = bucket_mb(config, MACHINE)
    assert size > 1e-3
    exact = replace(config, parallel=replace(config.parallel, bucket_mb=size))
    calls, wanted = (len(simulate(each, 256, MACHINE)[0].rows) for each in (config, exact))
    assert calls == wanted
    candidates = Candidates(Estimator(256, MACHINE), 16, 1e12)
    base = replace(bare(config), mesh=config.mesh)
    (found,) = candidates.options(base, 1, (1,), MEMORY_OPTIONS[0])
    assert found.config.parallel.bucket_mb == size
    assert layout(found.config)["parallel"]["bucket_mb"] == size
    (found,) = Candidates(candidates.estimator, 16, 1e12, 7.0).options(
        base, 1, (1,), MEMORY_OPTIONS[0]
    )
    assert found.config.parallel.bucket_mb == 7


def test_run_chooses_by_its_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = replicated(4096, zero=1)
    assert with_bucket_size_of_run(config).parallel.bucket_mb == BUCKET_MB  # nothing is measured
    gpus = replace(config, train=replace(config.train, backend="cupy"))
    chosen = bucket_mb(gpus, load(default_machine()))
    assert with_bucket_size_of_run(gpus).parallel.bucket_mb == chosen > BUCKET_MB
    named = with_bucket_size_of_run(config, "v100-8x4").parallel.bucket_mb
    assert named == bucket_mb(config, load("v100-8x4"))
    folder = tmp_path / "inputs" / "machines"
    folder.mkdir(parents=True)
    (folder / "this-machine.toml").write_bytes(default_machine().read_bytes())
    assert with_bucket_size_of_run(config).parallel.bucket_mb == bucket_mb(
        config, load(default_machine())
    )
    alone = replicated(1)
    assert with_bucket_size_of_run(alone) is alone
