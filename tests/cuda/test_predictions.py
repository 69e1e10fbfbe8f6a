"""What is predicted of a device is what it does: every launch, its bytes, and the memory."""

from collections import Counter
from itertools import product

import pytest

from hpc3d.cluster import shapes
from hpc3d.predict import device
from hpc3d.predict.rank import observe
from hpc3d.trace.recorder import Recorder
from hpc3d.training.loop import Trainer
from tests.cuda import rules
from tests.cuda.rules import on_devices
from tests.pipeline.mixes import Tokens

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("counts_from_zero")]

ONE = "p=1 schedule=none microbatches=2 layers=2 batch=4 steps=2 backend=cupy dtype=float32"
LINES = [
    f"{ONE} gelu=exact dropout=0.25 recompute=selective",
    f"{ONE} fused_gelu=true tied=false recompute=full",
    f"{ONE} dtype=bfloat16 hidden=32 heads=4 sequence=8 recompute=selective",
    f"x=2 y=2 z=2 scheme=3d {ONE[4:]} batch=8",
    f"p=2 d=2 x=2 zero=1 scheme=1d {ONE[4:]} schedule=1f1b batch=8",
    f"d=2 x=2 zero=3 dropout=0.25 {ONE[4:]} batch=8",
    f"x=2 y=2 scheme=2d-summa {ONE[4:]} batch=8",
]


def observed(mesh, config):
    """The peaks of a rank in its second step."""
    batches = Tokens(config) if mesh.rank == 0 else None
    mesh = mesh.traced(Recorder(None, {"rank": mesh.rank}, 1 << 15))
    trainer = Trainer(mesh, config, config.model.vocabulary, batches)
    for number in range(2):
        trainer.step(number)
    return dict(mesh.pool.peak)


@pytest.fixture
def told(monkeypatch):
    """Counts what the rules of all predicted ranks do, like a Launcher."""
    counted = rules.Launcher(None)

    def launched(self, name, rows, columns, /, **given):
        counted.count[name] += 1
        counted.bytes[name] += sum(getattr(value, "nbytes", 0) for value in given.values())

    def multiplied(self, a, b, out, **beside):
        counted.count["product"] += 1

    monkeypatch.setattr(device.Planned, "told", launched)
    monkeypatch.setattr(device.Planned, "multiplied", multiplied)
    return counted


@pytest.mark.parametrize("line", rules.some(LINES, 2, 3))
def test_what_is_launched_and_held_is_predicted(line, launcher, told):
    if "bfloat16" in line:
        rules.register(launcher, rules.Flash())
    config = rules.config_of(line)
    measured = on_devices(line, observed)
    rules.register(launcher)
    sizes = config.mesh.sizes()
    for place, peaks in zip(product(*map(range, sizes.values())), measured, strict=True):
        mesh = shapes.rank_of(sizes, dict(zip(sizes, place)), device.pool_of(config))
        predicted = observe(mesh, config, config.model.vocabulary).peak
        played = {"all", "workspace"} | ({"activation"} if "bfloat16" in line else set())
        kinds = peaks.keys() - played  # what the rules take, and Flash, is of no pool here
        assert {kind: predicted[kind] for kind in kinds} == {kind: peaks[kind] for kind in kinds}
    assert told.count == Counter(launcher.count)
    assert told.bytes == Counter(launcher.bytes)
