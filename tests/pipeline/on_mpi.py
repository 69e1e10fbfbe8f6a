"""Mixes on the ranks of an MPI job, one after the other: TRANSPORT LINE ...

Before them the job says whether a message of the size of a stage's block is buffered.
"""

import sys
import time

from hpc3d.runtime import launch

BLOCK = 2048  # bytes, fewer than any block between two stages has


def body(job):
    from hpc3d.comm.cartesian import build
    from tests.pipeline.mixes import config_of, same, train

    transport, *lines = sys.argv[1:]
    say(job, "buffered" if buffered(job.comm) else "not buffered")
    for line in lines:
        config, wanted = job.from_root(lambda line=line: (config_of(line), expected(line)))
        same(train(build(config.mesh.sizes(), transport=transport), config), wanted)
        job.barrier()
        say(job, line)


def say(job, line):
    if job.rank == 0:
        print(line, flush=True)


def expected(line):
    """What a mix must come to: the serial model, or what its asynchronous rule says."""
    from tests.pipeline.mixes import alone, serial, words_of

    if not words_of(line)["schedule"].startswith("pipedream"):
        return serial(alone(line))
    from tests.pipeline.test_weight_versions import reference, rule_of

    return reference(rule_of(line))


def buffered(comm):
    """Whether a message is gone although nobody receives it: the eager protocol."""
    import numpy as np

    message, gone = np.zeros(BLOCK, np.uint8), False
    comm.Barrier()  # all have loaded what they need
    if comm.rank == 0:
        request, end = comm.Isend(message, 1), time.monotonic() + 3
        while not gone and time.monotonic() < end:
            gone = request.Test()
    comm.Barrier()
    if comm.rank == 1:
        comm.Recv(message, 0)
    if comm.rank == 0:
        request.Wait()
    return comm.bcast(gone)


if __name__ == "__main__":
    sys.exit(launch.run("test", body))
