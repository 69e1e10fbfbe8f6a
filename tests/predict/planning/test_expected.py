"""The order in which a search estimates its candidates."""

import pytest

from hpc3d.predict.machine.machine_file import load as load_machine
from hpc3d.predict.planning.expected import ExpectedSteps
from hpc3d.predict.planning.search import Search
from tests.predict.planning.test_search import GB, ROOT, VOCABULARY, config_of, settled

MODEL = (
    "model.kind=llama model.layers=8 model.hidden=8192 model.heads=64 model.ffn=28672 "
    "model.sequence=8192 train.batch=128 train.dtype=bfloat16 train.backend=cupy"
)
LINES = ["p=2 d=16 schedule=1f1b", "p=2 d=4 x=4 scheme=1d-sequence schedule=1f1b"]


class TwoCandidates(Search):
    """Search of the meshes of LINES: replicas, and tensor parallelism inside a node."""

    def allowed_candidates(self):
        return [self.bounds.candidate(settled(f"{MODEL} {line}", 32)) for line in LINES]


def first(memory):
    """Return the mesh on which a budget of one estimate is spent, and both step times in s."""
    machine = load_machine(ROOT / "inputs" / "machines" / "h100.toml")
    searched = TwoCandidates(config_of(MODEL), 32, VOCABULARY, machine, memory)
    found = searched.run(top=1, most=1)
    seconds = [searched.timed(each).best.seconds for each in searched.allowed_candidates()]
    return found.timed[0].candidate.config.mesh, seconds


def test_candidate_that_needs_no_recomputation_is_timed_first():
    mesh, (replicas, tensor) = first(26 * GB)
    assert tensor < 0.95 * replicas
    assert mesh.x == 4


def test_candidate_with_less_communication_is_timed_first_if_both_fit():
    mesh, (replicas, tensor) = first(140 * GB)
    assert replicas < tensor
    assert mesh.d == 16


@pytest.mark.parametrize("memory", [30, 140])
@pytest.mark.parametrize("line", ["p=2 d=16", "p=4 d=8", "d=8 x=4", "d=8 x=2 z=2 scheme=2.5d"])
def test_expected_step_is_near_the_estimate(line, memory):
    machine = load_machine(ROOT / "inputs" / "machines" / "h100.toml")
    searched = Search(config_of(MODEL), 32, VOCABULARY, machine, memory * GB)
    candidate = searched.bounds.candidate(settled(f"{MODEL} {line}", 32))
    costs = searched.estimator.costs
    excess, seconds = ExpectedSteps(searched.base, 32, memory * GB, costs).of(candidate)
    timed = searched.timed(candidate)
    assert timed.fits == (excess == 0)
    assert seconds == pytest.approx(timed.best.seconds, rel=0.15)
