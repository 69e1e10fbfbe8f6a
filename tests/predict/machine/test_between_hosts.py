"""Communication between hosts without devices: network cards and cores, separately and together.
Expected times are computed by hand, for a machine with round numbers."""

import tomllib
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hpc3d.predict.machine.between_hosts import carried, legs
from hpc3d.predict.machine.collective_costs import best
from hpc3d.predict.machine.machine import CallTable, Link, Machine, Rates
from hpc3d.predict.machine.machine_file import dumps, load
from hpc3d.predict.planning.bounds import Bounds, volumes
from hpc3d.predict.planning.cost_table import CostTable
from hpc3d.predict.planning.estimate import Estimator
from hpc3d.predict.planning.ranking import Ranking
from hpc3d.predict.planning.search import Search
from hpc3d.predict.simulation.simulator import (
    CoreSharing,
    core_sharing,
    simulate,
    step_length,
    with_shared_cores,
)
from tests.predict.planning.test_search import ROOT, config_of, settled
from tests.strided import strided

ALPHA, WIRE, LAUNCH, MEMORY, NEAR, NEAR_ALPHA = 1e-4, 25e6, 1e-6, 1e9, 2e9, 1e-5
MB = 1e6
OPS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all")


def hosts(ranks, cores=1, wake=0.0):
    """Return hosts with `ranks` ranks each, whose network cards have 200 Mbit/s."""
    near = (Link(ranks, NEAR_ALPHA, NEAR),) if ranks > 1 else ()
    return Machine(
        name="hosts",
        source="round numbers",
        ranks_per_node=ranks,
        cores=cores,
        memory_gb=1.0,
        memory_bandwidth=MEMORY,
        launch_s=LAUNCH,
        gemm={"float32": Rates(9e10, (1e4, 1e6, 1e8), (1e9, 2e10, 9e10))},
        links=(*near, Link(0, ALPHA, WIRE, WIRE)),
        wakeup_s=wake,
    )


# Bytes on the card, for a block of 1 MB


@pytest.mark.parametrize(
    ("op", "counted", "carries"),
    [
        ("all_gather", 1 / 2, 1 / 2),
        ("reduce_scatter", 1 / 2, 1 / 2),
        ("all_reduce", 1, 1),
        ("broadcast", 1, 1),
        ("reduce", 1, 1),
        ("all_to_all", 1 / 2, 1 / 2),
        ("send", 1, 1),
    ],
)
def test_nic_volume_with_one_rank_per_host_equals_the_traced_bytes(op, counted, carries):
    there = hosts(1).crossing((0, 1))
    assert carried(op, counted * MB, there) == pytest.approx(carries * MB, rel=1e-12)


@pytest.mark.parametrize(
    ("op", "counted", "carries"),
    [
        ("all_gather", 7 / 8, 1 / 2),
        ("reduce_scatter", 7 / 8, 1 / 2),
        ("all_reduce", 14 / 8, 1),
        ("broadcast", 1, 1),
        ("reduce", 1, 1),
        ("all_to_all", 7 / 8, 4 / 2),  # to each of the others a part of its own
    ],
)
def test_nic_volume_with_four_ranks_per_host_equals_that_of_one_rank(op, counted, carries):
    there = hosts(4).crossing(range(8))
    assert (there.hosts, there.local) == (2, (0, 1, 2, 3))
    assert carried(op, counted * MB, there) == pytest.approx(carries * MB, rel=1e-12)


def test_nic_volume_on_three_hosts():
    there = hosts(2).crossing(range(6))
    assert carried("all_reduce", 2 * 5 / 6 * MB, there) == pytest.approx(4 / 3 * MB, rel=1e-12)
    assert carried("all_gather", 5 / 6 * MB, there) == pytest.approx(2 / 3 * MB, rel=1e-12)


# Seconds of a call


def test_reduce_scatter_time_on_two_hosts():
    """Half of the block leaves each network card, in both directions at once."""
    found = legs(hosts(1), "reduce_scatter", MB / 2, (0, 1))
    assert found.wired == pytest.approx(ALPHA + MB / 2 / WIRE, rel=1e-12)
    assert found.work == pytest.approx(LAUNCH + MB / 2 / MEMORY, rel=1e-12)


def test_broadcast_time_on_four_hosts():
    """The root sends the block once; the last pieces are passed on after it has sent them."""
    for nbytes, each in ((MB, 4), (2e5, 2), (2e4, 1)):
        found = legs(hosts(1), "broadcast", nbytes, range(4))
        wanted = 2 * ALPHA + (1 + 2 / 3 / each) * nbytes / WIRE
        assert found.wired == pytest.approx(wanted, rel=1e-12)
    many = legs(hosts(1), "broadcast", MB, range(9))
    assert many.wired == best("broadcast", 9, MB, ALPHA, 1 / WIRE)


def test_two_level_call_time():
    """A host moves 3/4 of a rank's block internally, and each rank sends 1/8 of it to its peer."""
    machine = hosts(4)
    found = legs(machine, "reduce_scatter", 7 / 8 * MB, range(8))
    inside = machine.call("reduce_scatter", 3 / 4 * MB, (0, 1, 2, 3))
    assert found.work == pytest.approx(inside + LAUNCH + MB / 8 / MEMORY, rel=1e-12)
    assert found.wired == pytest.approx(ALPHA + MB / 2 / WIRE, rel=1e-12)
    both = legs(machine, "all_reduce", 14 / 8 * MB, range(8))
    other = machine.call("all_gather", 3 / 4 * MB, (0, 1, 2, 3))
    assert both.work == pytest.approx(inside + other + LAUNCH + MB / 4 / MEMORY, rel=1e-12)


@pytest.mark.parametrize("op", OPS)
def test_call_inside_a_host_uses_no_network(op):
    machine = hosts(4)
    found = legs(machine, op, MB, (0, 1, 2, 3))
    assert found == (machine.call(op, MB, (0, 1, 2, 3)), 0.0)


def test_concurrent_groups_share_the_nic():
    """Four pairs between the hosts send four blocks; two groups of two ranks per host send two."""
    four = legs(hosts(4), "all_gather", MB / 2, (0, 4)).wired
    two = legs(hosts(4), "all_gather", 3 / 4 * MB, (0, 1, 4, 5)).wired
    assert four == pytest.approx(ALPHA + 4 * MB / 2 / WIRE, rel=1e-12)
    assert two == pytest.approx(ALPHA + 2 * MB / 2 / WIRE, rel=1e-12)
    free = replace(hosts(4), links=(Link(4, NEAR_ALPHA, NEAR), Link(0, ALPHA, WIRE)))
    assert legs(free, "all_gather", MB / 2, (0, 4)).wired == pytest.approx(ALPHA + MB / 2 / WIRE)


def test_messages_share_the_nic_with_others_that_leave_the_host():
    """Stages have two ranks, on hosts of four; the second stage sends to the next host."""
    assert legs(hosts(4), "send", MB, (2, 4)).wired == pytest.approx(ALPHA + 2 * MB / WIRE)
    assert legs(hosts(4), "send", MB, (0, 4)).wired == pytest.approx(ALPHA + 4 * MB / WIRE)


@pytest.mark.parametrize("op", OPS)
def test_call_time_is_the_sum_of_its_work_and_network_parts(op):
    machine = hosts(4)
    work, wired = legs(machine, op, MB, range(8))
    assert machine.call(op, MB, range(8)) == work + wired


def test_single_host_measurements_do_not_apply_across_hosts():
    table = CallTable("all_gather", 2, 0, "at once", (1e3, 1e6), (1e-5, 1e-3))
    machine = replace(hosts(2), measured=(table,))
    assert machine.call("all_gather", 1e6, (0, 1)) == pytest.approx(1e-3)
    across = legs(machine, "all_gather", 1e6, (0, 2))
    assert across == pytest.approx((1e-3, ALPHA + 2 * 1e6 / WIRE))  # both pairs, by the card
    devices = replace(machine, cores=0)
    assert devices.call("all_gather", 1e6, (0, 2)) > 1e6 / WIRE


# Steps

SMALL = "model.layers=2 model.hidden=256 model.heads=8 model.sequence=64 train.batch=16"
LAYOUTS = """
x=8 scheme=1d
x=8 scheme=1d-sequence
x=4 y=2 scheme=2d-summa
x=2 y=2 z=2
x=2 y=2 z=2 order='z p d c e x y'
x=2 y=2 z=2 order='y p d c e x z'
d=2 x=2 y=2 scheme=2d
d=2 x=4 scheme=1d
d=8
p=2 x=4 microbatches=4 schedule=1f1b
""".strip().splitlines()


def layout(line):
    line, _, order = line.partition(" order=")
    config = settled(f"{SMALL} {line}")
    if order:
        config = replace(config, mesh=replace(config.mesh, order=order.strip("'")))
    return config


def seconds(config, machine):
    return step_length(simulate(config, 256, machine)) / 1e9


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("line", strided(LAYOUTS, 3))
def test_estimate_for_shared_cores_is_close_to_the_simulation(line, ranks):
    machine, config = hosts(ranks, wake=2e-5), layout(line)
    found, taken = Estimator(256, machine).estimate(config), seconds(config, machine)
    assert found.seconds == pytest.approx(taken, rel=0.06)
    parts = found.compute + found.bubble + found.waits.total()
    assert parts == pytest.approx(found.seconds, rel=1e-9)
    assert min(found.compute, found.bubble + 1e-12, *found.waits.values()) >= 0


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("line", strided(LAYOUTS, 3, 1))
def test_bounds_are_below_simulations_with_shared_cores(line, ranks):
    machine, config = hosts(ranks, wake=2e-5), layout(line)
    costs, bounds = CostTable(256, machine), Bounds(config, 8, 256, machine)
    bounds.calibrate(config, costs.parts(config), costs.world(config).seconds)
    place = bounds.moves(config, volumes(config))
    assert 0 < bounds.least(place) <= seconds(config, machine)


# Groups between hosts that ranks of a host are in, where none of their groups has all of them.
LANES = {
    "x=4 y=2 scheme=2d-summa": 2,
    "x=2 y=2 z=2": 4,
    "x=2 y=2 z=2 order='z p d c e x y'": 4,
    "x=2 y=2 z=2 order='y p d c e x z'": 4,
    "d=2 x=2 y=2 scheme=2d": 4,
}


@pytest.mark.parametrize("line", strided([line for line in LAYOUTS if "p=2" not in line], 3))
def test_step_time_adds_the_work_of_ranks_on_a_core_to_the_network_time(line):
    """The network gets faster and faster; alternating lanes hide some of its time."""
    config, lanes = layout(line), LANES.get(line, 1)
    for rate in (1, 1e2, 1e4):
        slow = hosts(4)
        wire = replace(slow.links[1], bandwidth=rate * WIRE, node_bandwidth=rate * WIRE)
        slow = replace(slow, links=(slow.links[0], replace(wire, alpha_s=1e-6)))
        (alone,) = simulate(config, 256, replace(slow, cores=4))
        (crowd,) = simulate(config, 256, slow)
        assert step_length([alone]) == pytest.approx(alone.busy + alone.wired, rel=2e-3)
        early = (1 - 1 / lanes) / 2 * min(4 * alone.busy, crowd.wired)
        wanted = 4 * alone.busy + crowd.wired - early
        assert step_length([crowd]) == pytest.approx(wanted, rel=2e-2)
        assert 0 < crowd.wired <= alone.wired + 1


def test_waiting_stages_leave_cores_only_to_ranks_of_their_node():
    """With one microbatch, the ranks of a host compute at the same time and wait at the same time.
    On a node with the cores of both hosts, each stage has all cores while the other one waits. If
    two hosts share a core, the ranks of each have half of it."""
    config, quick = layout("p=2 x=4"), (Link(0, 1e-9, 1e12),)
    for machine, times in ((hosts(4), 4), (hosts(8, cores=2), 2), (hosts(4, cores=0.5), 8)):
        machine = replace(machine, links=quick)
        alone = simulate(config, 256, replace(machine, cores=8))
        taken = step_length(simulate(config, 256, machine))
        assert taken == pytest.approx(times * step_length(alone), rel=0.07)


def test_shared_cores_hide_more_network_time():
    """A rank reduces gradients along d during its backward pass, slower with shared cores."""
    config = settled(f"{SMALL} d=8 bucket_mb=0.5")
    machine = replace(hosts(4), links=(Link(4, NEAR_ALPHA, NEAR), Link(0, ALPHA, 1e8, 1e8)))
    (alone,) = simulate(config, 256, replace(machine, cores=4))
    (crowd,) = simulate(config, 256, machine)
    assert crowd.wired < 0.8 * alone.wired


def test_simulation_runs_once_without_shared_cores():
    shares = []

    def runs(share):
        shares.append(share)
        return simulate(layout("d=8"), 256, hosts(4, cores=4))

    with_shared_cores(CoreSharing(1.0, 1.0, 1.0), runs)
    assert shares == [1.0]


def test_step_takes_at_least_the_work_of_all_ranks_on_a_core():
    """In a step of 100 ns, four ranks of a core compute for 60 ns each; their cores are slowed
    down until the step takes 240 ns."""

    def runs(share):
        return [SimpleNamespace(step=(0, 0, 0, 60 + 40 * share), mean_busy=60, wired=0)]

    assert step_length(with_shared_cores(CoreSharing(4.0, 2.0, 1.0), runs)) == 240


def test_tensor_axes_inside_a_host_have_no_network_lanes():
    config = layout("x=2 y=2 z=2")
    assert [core_sharing(config, machine).lanes for machine in (hosts(8, 2), hosts(4))] == [1, 4]


@pytest.mark.slow
def test_plan_simulates_cube_layouts():
    """With 2 hosts of 4 ranks and one core each, a cube is as good as the best layouts."""
    machine = hosts(4, wake=2e-5)
    line = "model.layers=1 model.hidden=256 model.heads=8 model.sequence=64 train.batch=16"
    search = Search(config_of(line), 8, 256, machine, 16e9)
    ranking = Ranking(search, search.run(10, 400), machine, most=1e4)
    ranking.best(10)
    cubes = [
        row
        for config, row in ranking.known.items()
        if (config.mesh.x, config.mesh.y, config.mesh.z) == (2, 2, 2)
    ]
    assert cubes and all(row.simulated for row in cubes)


def test_machine_file_example_in_the_documentation_is_valid(tmp_path):
    text = (ROOT / "docs" / "limits.md").read_text()
    lines = text[text.index("    ranks_per_node") :].split("\n\n* ")[0]
    shown = tomllib.loads(lines.replace("\n    ", "\n").strip())
    links = tuple(Link(**link) for link in shown.pop("links"))
    known = replace(hosts(8, cores=8), links=(Link(0, NEAR_ALPHA, NEAR),))
    machine, path = replace(known, links=links, **shown), tmp_path / "hosts.toml"
    path.write_text(dumps(machine))
    assert load(path) == machine
    assert (machine.ranks_per_node, machine.cores) == (4, 1)
    found = legs(machine, "all_gather", MB / 2, (0, 4)).wired
    assert found == pytest.approx(1e-4 + 4 * MB / 2 / 25e6, rel=1e-12)
