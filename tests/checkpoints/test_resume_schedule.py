"""Schedule settings of a resumed run with another number of stages."""

from dataclasses import replace

import pytest

from hpc3d.checkpoints.resume import with_free_schedule
from hpc3d.config.load import load, to_toml
from hpc3d.config.resolve import resolve


@pytest.mark.parametrize(
    ("begun", "words", "schedule", "chunks"),
    [
        ("--mesh.x 2", "--mesh.x 1 --mesh.p 2", "1f1b", 1),
        ("--mesh.x 2", "--mesh.x 1 --mesh.p 2 --parallel.schedule zb-v", "zb-v", 2),
        ("--mesh.x 2", "--mesh.x 1 --mesh.p 2 --parallel.schedule interleaved", "interleaved", 2),
        ("--mesh.p 2", "--mesh.p 1 --mesh.x 2", "none", 1),
        ("--mesh.p 2 --parallel.schedule zb-h1", "", "zb-h1", 1),
        ("--mesh.p 2 --parallel.schedule zb-h1", "--mesh.p 4", "zb-h1", 1),
        ("--mesh.p 2", "--train.steps 9", "1f1b", 1),
    ],
)
def test_schedule_defaults_follow_the_new_number_of_stages(
    begun, words, schedule, chunks, tmp_path
):
    sizes = ["--model.layers", "4", "--parallel.microbatches", "4"]
    first = load(None, [*sizes, *begun.split()])
    first = resolve(first, first.mesh.grid().size)
    (tmp_path / "config.toml").write_text(to_toml(first))
    now = load(tmp_path / "config.toml", words.split(), of_run=True)
    now = resolve(with_free_schedule(now, first), now.mesh.grid().size)
    assert (now.parallel.schedule, now.parallel.chunks) == (schedule, chunks)
    same = replace(now.parallel, schedule=None, chunks=None)
    assert same == replace(first.parallel, schedule=None, chunks=None)
