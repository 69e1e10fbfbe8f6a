"""All layouts that the rules allow, as a reference for plans."""

from dataclasses import replace
from itertools import chain, permutations, product

from hpc3d.comm.grid import AXES
from hpc3d.pipeline.schedule import SCHEDULES
from hpc3d.predict.planning import layouts
from hpc3d.predict.planning.contexts import contexts, with_context
from hpc3d.predict.simulation.simulator import simulate
from hpc3d.tensor.split import SCHEMES

MODULES = "core_attn", "layernorm", "mlp"
WAYS = [*product((True, False), ("none", "selective", MODULES, "full"))]


def every_layout(config, ranks, orders=False, cut=False, schemes=SCHEMES, varied=False):
    """Return the resolved layouts of an unresolved `config` with synchronous schedules, and on
    request with every order of the axes, every context, and hybrid sharding and prefetching.
    Omitted layouts are equivalent to others in every step."""
    base = layouts.bare(config)
    sizes = base.model.layers, base.train.batch
    for c, e in product(layouts.divisors(ranks) if cut else [1], parts_of_experts(base, ranks)):
        if ranks % (c * e):
            continue
        for mesh in layouts.meshes(ranks // (c * e), *sizes, schemes):
            shared = replace(base, mesh=replace(base.mesh, e=e))
            whole = layouts.with_mesh(shared, mesh, schemes)
            for placed in (
                [with_context(whole, c, *how) for how in contexts(c)] if c > 1 else [whole]
            ):
                for each in ordered(placed) if orders else [placed]:
                    found = variants(each)
                    found = chain.from_iterable(map(sharded, found)) if varied else found
                    yield from filter(lambda one: not layouts.problems(one, ranks), found)


def parts_of_experts(config, ranks):
    """Return the sizes of e that divide both experts and ranks."""
    return [e for e in layouts.divisors(ranks) if (config.model.experts or 1) % e == 0]


def ordered(config):
    """Return the orders of the axes with more than one rank."""
    sizes = config.sizes()
    split = [axis for axis in AXES if sizes[axis] > 1]
    rest = [axis for axis in AXES if sizes[axis] == 1]
    for order in permutations(split):
        yield replace(config, mesh=replace(config.mesh, order=" ".join([*order, *rest])))


def variants(config):
    """Return all options on a mesh, allowed or not."""
    mesh, train = config.mesh, config.train
    gathers = mesh.x * mesh.y * mesh.z > 1
    ways = [(keep, again) for keep, again in WAYS if keep or gathers]
    zeros = range(4) if mesh.replicas() > 1 else (0,)
    counts = layouts.divisors(train.batch // (mesh.d * mesh.e))
    for (name, chunks), micros in product(schedules(mesh.p, config.model.layers), counts):
        for zero, (keep, again) in product(zeros, ways):
            changes = {"schedule": name, "chunks": chunks, "microbatches": micros, "zero": zero}
            changes |= {"keep_gathered": keep, "recompute": again}
            yield replace(config, parallel=replace(config.parallel, **changes))


def sharded(config):
    """Return a layout with every kind of hybrid sharding, with and without prefetching."""
    parallel, replicas = config.parallel, config.mesh.d
    groups = [size for size in layouts.divisors(replicas) if 1 < size < replicas]
    for shard, prefetch in product([0, *(groups if parallel.zero else [])], (False, True)):
        yield replace(config, parallel=replace(parallel, shard=shard, prefetch=prefetch))


def schedules(stages, layers):
    """Return (name, chunks) of the synchronous schedules; for one stage, there is only one."""
    for name, schedule in SCHEDULES.items():
        chunks = [schedule.chunks] if schedule.chunks else range(2, layers // stages + 1)
        if not schedule.asynchronous and (name == "none") == (stages == 1):
            yield from ((name, count) for count in chunks)


def step(config, vocabulary, machine):
    """Return seconds and peak bytes by simulation."""
    runs = simulate(config, vocabulary, machine)
    start, end = min(run.step[2] for run in runs), max(run.step[3] for run in runs)
    return (end - start) / 1e9, max(run.peak["all"] for run in runs)
