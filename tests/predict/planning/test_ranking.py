"""Named layouts, and the reasons why other layouts are slower."""

from dataclasses import replace

import pytest

from hpc3d.predict.machine.machine import Link
from hpc3d.predict.planning.ranking import Ranking, estimated, shown_layout
from tests.predict.planning.test_search import CLUSTER, SMALL, config_of, search, settled, step


@pytest.mark.slow
def test_slow_links_are_the_reason_of_losing_layouts():
    slow = replace(CLUSTER, links=(Link(0, 1e-4, 1e8),))
    searched, found = search(machine=slow)
    ranking = Ranking(searched, found, slow, most=1e9)
    losers = ranking.losers(ranking.best(3)[0])
    assert losers[0].reason.startswith("axis ")
    assert sum(loser.count for loser in losers) == len(found.timed) - 1


def test_slower_layouts_fit_in_memory():
    """The fastest layout exceeds the limit in its simulation, but not in its estimate."""
    searched, found = search()
    ranking = Ranking(searched, found, CLUSTER, most=1e9)
    first, second, *_ = (each.best for each in found.timed)
    ranking.known[first.config] = estimated(first)._replace(peak=10**12)
    losers = ranking.losers(ranking.run(second))
    assert losers
    for reason, _, nearest in losers:
        assert ranking.fits(ranking.known.get(nearest.config, nearest)) == (reason != "memory")


def test_smallest_layout_does_not_depend_on_the_memory_limit():
    rows, memory = [], 1e6
    for share in (0.99, 0.7, None):
        searched, found = search(ranks=4, memory=memory)
        ranking = Ranking(searched, found, CLUSTER, most=1e9)
        assert not ranking.best(10)
        rows.append(ranking.smallest())
        memory = share and share * rows[0].peak
    assert rows[0].simulated and rows[0] == rows[1] == rows[2]


def test_communication_of_a_layout_excludes_waiting_for_other_stages():
    searched, found = search()
    ranking = Ranking(searched, found, CLUSTER, most=1e9)
    config = settled(f"{SMALL} p=2 d=2 x=2 scheme=1d zero=1 microbatches=4 schedule=1f1b")
    estimate = searched.estimator.estimate(config)
    row, rough = ranking.run(estimate), estimated(estimate)
    assert sorted(row.waits) == ["d", "x"]
    assert row.communication == pytest.approx(sum(row.waits.values()) / row.seconds)
    within = sum(rough.waits[axis] for axis in "dx")
    assert rough.communication == pytest.approx(within / rough.seconds)
    assert sum(rough.waits.values()) > within


def test_best_cuboid_has_at_least_two_tensor_axes():
    searched, found = search()
    ranking = Ranking(searched, found, CLUSTER, most=1e9)
    ranking.widen()
    config = ranking.named()["best cuboid"].config
    assert config.parallel.scheme in ("2d", "3d")
    assert [config.mesh.x, config.mesh.y, config.mesh.z].count(1) < 2


@pytest.mark.slow
def test_named_layouts_include_the_best_of_each_scheme(monkeypatch):
    searched, found = search()
    ranking = Ranking(searched, found, CLUSTER, most=1e9)
    ranking.widen()
    ranking.widen(config_of("p=1 d=1").mesh)
    best, named = ranking.best(10), ranking.named(config_of("p=1 d=1").mesh)
    assert {name: row.config.parallel.scheme[:2] for name, row in named.items()} == {
        "1-D": "1d",
        "2-D": "2d",
        "cube": "3d",
        "best cuboid": named["best cuboid"].config.parallel.scheme[:2],
    }
    assert named["best cuboid"].seconds <= named["cube"].seconds
    cube = named["cube"].config
    assert (cube.mesh.x, cube.mesh.y, cube.mesh.z, cube.mesh.d) == (2, 2, 2, 1)
    assert named["cube"].seconds == pytest.approx(step(cube)[0], rel=1e-9)
    assert all(best[0].seconds <= row.seconds for row in named.values())
    assert [row.seconds for row in best] == sorted(row.seconds for row in best)
    monkeypatch.setattr("hpc3d.predict.planning.ranking._EACH", 0)  # nothing else is simulated
    first = next(row for row in best if row.config.parallel.scheme.startswith("1d"))
    assert ranking.named()["1-D"] == first


def test_layout_text_matches_the_input_file_keys():
    line = "p=2 d=2 x=2 scheme=1d zero=1 microbatches=4 schedule=zb-h1"
    assert shown_layout(settled(f"{SMALL} {line}")) == line
