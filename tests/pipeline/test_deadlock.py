"""No schedule relies on buffering: real ranks whose sends wait for the matching receives."""

import pytest

from tests.jobs import Case
from tests.pipeline.mixes import config_of, ranks
from tests.pipeline.on_mpi import BLOCK, BUFFERED, NOT_BUFFERED

# Messages of all sizes wait for their receives; Open MPI 4 and 5 name it each in its way.  A limit
# of 0 or 64 makes Open MPI give up; every block between stages is larger than BLOCK, and that such
# a message waits is seen first.
UNBUFFERED = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,vader",
    "OMPI_MCA_btl_sm_eager_limit": "128",
    "OMPI_MCA_btl_vader_eager_limit": "128",
}

LINES = """
p=4 schedule=gpipe microbatches=4 steps=2
p=4 schedule=gpipe microbatches=4 batch=480 steps=2
p=4 schedule=1f1b microbatches=8 steps=2
p=4 schedule=1f1b microbatches=4 batch=480 steps=2
p=2 d=2 schedule=interleaved chunks=2 microbatches=4 steps=2
p=4 schedule=interleaved chunks=2 microbatches=8 layers=8 steps=2
p=4 schedule=zb-h1 microbatches=8 steps=2
p=4 schedule=zb-h2 microbatches=8 steps=2
p=2 d=2 schedule=zb-v chunks=2 microbatches=4 steps=2 zero=3
p=4 schedule=zb-v chunks=2 microbatches=8 layers=8 steps=2
p=2 d=2 schedule=csv:{here}/by_hand.csv chunks=2 microbatches=4 steps=2 zero=2
p=4 schedule=pipedream microbatches=4 steps=3 tied=false clip=0
p=4 schedule=pipedream-2bw microbatches=4 steps=3
""".strip().splitlines()


ON_MPI = "tests.pipeline.on_mpi"


@pytest.mark.slow
@pytest.mark.timeout(0)  # tests.jobs limits each case
@pytest.mark.parametrize(
    "case",
    [Case(4, how, line) for how in ("auto", "mpi") for line in (NOT_BUFFERED, *LINES)],
    ids=str,
)
def test_schedules_run_without_message_buffering(run_in_job, case):
    run_in_job(ON_MPI, case, UNBUFFERED)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("case", [Case(2, "mpi", BUFFERED)], ids=str)
def test_mpi_buffers_small_messages(run_in_job, case):
    run_in_job(ON_MPI, case)


def test_message_blocks_exceed_the_buffered_size():
    """They exceed the message that is tested for buffering, and some exceed 64 KiB."""
    sizes = [block(config_of(line)) for line in LINES]
    assert {ranks(line) for line in LINES} == {4}
    assert min(sizes) > BLOCK and max(sizes) > 1 << 16


def block(config):
    """Return the bytes of a message between two stages, which d replicas share."""
    rows = config.train.batch // config.parallel.microbatches * config.model.sequence
    return rows * config.model.hidden * 8 // config.mesh.d
