"""A mix on the ranks of an MPI job (tests/jobs.py), or a check for buffered messages."""

BLOCK = 2048  # bytes, fewer than any block between two stages has
BUFFERED, NOT_BUFFERED = "buffered", "not buffered"


def case(job, transport, line):
    from hpc3d.comm.cartesian import build
    from tests.pipeline.mixes import config_of, same, train

    if line in (BUFFERED, NOT_BUFFERED):
        assert is_buffered(job.comm) == (line == BUFFERED)
        return
    config, wanted = job.from_root(lambda: (config_of(line), expected(line)))
    same(train(build(config.sizes(), transport=transport), config), wanted)


def expected(line):
    """Return the expected result of a mix: of the serial model, of workers with one rank each, or
    of its asynchronous rule."""
    from tests.pipeline.mixes import alone, serial, words_of
    from tests.pipeline.test_drawn import of_workers

    if "local_steps" in words_of(line):
        return of_workers(alone(line), line)
    if not words_of(line)["schedule"].startswith("pipedream"):
        return serial(alone(line))
    from tests.pipeline.test_weight_versions import reference, rule_of

    return reference(rule_of(line))


def is_buffered(comm):
    """Return True if a message is sent without a receive: the eager protocol."""
    import time

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
