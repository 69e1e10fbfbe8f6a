"""A machine with fixed, known times."""

from hpc3d.predict.machine.machine import Link, Machine, Rates

FLOPS, BYTES, LAUNCH, ALPHA, LINE = 1e12, 1e11, 1e-6, 5e-6, 1e10

MACHINE = Machine(
    name="fixed",
    source="round numbers",
    ranks_per_node=8,
    cores=0,
    memory_gb=1.0,
    memory_bandwidth=BYTES,
    launch_s=LAUNCH,
    gemm={dtype: Rates(FLOPS, (1.0,), (FLOPS,)) for dtype in ("bfloat16", "float32", "float64")},
    links=(Link(8, ALPHA, LINE), Link(0, 4 * ALPHA, LINE / 4)),
)
