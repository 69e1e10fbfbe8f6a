"""Costs from a profile: values equal to the measured seconds, and rejected profiles."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")

from hpc3d.partition import measured_profile
from hpc3d.partition.evaluation import PipelineChoice, StageChoice, evaluated
from hpc3d.partition.measured_profile import ModuleProfile
from hpc3d.partition.model_graph import costs_of, graph_of
from hpc3d.partition.module_plan import Wanted, best_plan
from hpc3d.partition.operation_costs import Operations
from hpc3d.partition.plan_file import digest_of, names_of
from tests.partition.sample_models import small
from tests.partition.test_operation_costs import FLOP

# A message of n bytes takes 1 + n / 100 s, a sum of which a rank receives n bytes 2 + n / 50.
CALLS = [
    {"op": "send", "members": 2, "bytes": [100, 1024, 10_000], "seconds": [2.0, 11.24, 101.0]},
    {"op": "all_reduce", "members": 2, "bytes": [100, 10_000], "seconds": [4.0, 202.0]},
]
RUN = {"forward": 0.25, "backward": 0.5, "step": 8.0, "update": 0.01}


def profile(name="mlp", **how):
    """Piece n takes 1 + n s plus (n + 1) / 4 per row forward, and twice that backward."""
    captured = small(name)
    rows, pieces = [1, 2, 4], {}
    for number in range(len(captured.pieces)):
        forward = [1 + number + (number + 1) * count / 4 for count in rows]
        pieces[names_of(captured)[number]] = [forward, [2 * each for each in forward]]
    made = ModuleProfile(name, digest_of(captured), "here", 2, 2, 1e9, rows, pieces, RUN, CALLS)
    return made._replace(**how)


def costs(batch=4, **how):
    made = profile(**how)
    return costs_of(made.operations(small("mlp")), made.machine(2), batch)


@pytest.mark.parametrize(("rows", "line"), [(1, 1), (2, 2), (3, 3), (4, 4)])
def test_seconds_are_interpolated_between_measurements(rows, line):
    atoms = costs().graph(rows).atoms
    expected = [1 + number + (number + 1) * line / 4 for number in range(12)]
    assert [atom.forward for atom in atoms] == pytest.approx(expected)
    assert [atom.backward for atom in atoms] == pytest.approx([2 * each for each in expected])


def test_seconds_are_extrapolated_by_rows():
    few, many = (costs().graph(rows).atoms for rows in (4, 12))
    assert [atom.forward for atom in many] == pytest.approx([3 * atom.forward for atom in few])


def test_profile_keeps_the_byte_counts():
    """It also keeps the fraction of weight gradients in backward: half of each product, except the
    first, whose input needs no gradient."""
    plain = graph_of(Operations(small("mlp")), FLOP, 4)
    found = costs().graph(4)
    assert found.values == plain.values and found.shared == plain.shared
    for ours, theirs in zip(found.atoms, plain.atoms, strict=True):
        same = ("ids", "memory", "saved", "parameters", "working", "pieces")
        assert [getattr(ours, name) for name in same] == [getattr(theirs, name) for name in same]
    shares = [atom.weight / atom.backward for atom in found.atoms]
    assert shares == pytest.approx([1.0, 0.0, *[0.5, 0.0] * 5])


def test_step_includes_measured_overheads_and_the_update():
    """Tests 4 rows on one rank, and on two stages with a message."""
    found, parameters = costs(), 6 * (64 * 64 + 64) * 4
    passes = 3 * sum(1 + number + number + 1 for number in range(12))
    one = evaluated(found, PipelineChoice((StageChoice(12),)))
    assert one.seconds == pytest.approx(passes + 0.75 + 8.0 + 0.01 * parameters)
    two = evaluated(found, PipelineChoice((StageChoice(6), StageChoice(12))))
    message = 1 + 4 * 64 * 4 / 100
    halves = passes + 2 * 0.75 + 8.0 + 0.01 * parameters / 2
    assert two.seconds == pytest.approx(halves + 2 * message)


def test_workspace_of_a_piece_adds_to_its_working_memory():
    """Piece n needs 100 n bytes a row, which are interpolated and extrapolated as seconds are."""
    plain = profile()
    pieces = {
        name: [*each, [100.0 * number * count for count in plain.rows]]
        for number, (name, each) in enumerate(plain.pieces.items())
    }
    found = costs(pieces=pieces, device="A GPU")
    for rows in (3, 8):
        more = [
            atom.working - other.working
            for atom, other in zip(found.graph(rows).atoms, costs().graph(rows).atoms, strict=True)
        ]
        assert more == pytest.approx([100 * number * rows for number in range(12)])
    one = PipelineChoice((StageChoice(12),))
    (more,), (less,) = (evaluated(each, one).held for each in (found, costs()))
    assert 0 < more - less <= 1100 * 4


def test_reordered_atoms_have_the_same_costs():
    found = costs()
    again = found.reordered([*range(found.count)])
    plain, other = (
        evaluated(each, PipelineChoice((StageChoice(12),))).seconds for each in (found, again)
    )
    assert plain == other > 8.0


def test_zero_1_replicas_share_the_update_time():
    found, parameters = costs(), 6 * (64 * 64 + 64) * 4
    steps = [
        evaluated(found, PipelineChoice((StageChoice(12, 2),), zero=zero)).seconds
        for zero in (0, 1)
    ]
    assert steps[0] - steps[1] == pytest.approx(0.01 * parameters / 2)


def test_planner_considers_the_overhead_per_stage():
    """With no overhead, two stages and many microbatches are faster; with much, one rank is."""
    quick = [{**each, "bytes": [1, 2], "seconds": [1e-9, 2e-9]} for each in CALLS]
    nothing = {**RUN, "step": 0.0, "update": 0.0, "forward": 0.0}
    wanted = Wanted(2, recompute="none", replicas=(1,))
    widths = [
        best_plan(costs(64, calls=quick, run={**nothing, "backward": extra}), wanted)
        for extra in (0.0, 1e4)
    ]
    assert [plan.choice.width for plan in widths] == [2, 1]
    assert widths[1].choice.microbatches == 1


def test_machine_of_a_profile_has_the_measured_calls():
    machine = profile().machine(2)
    assert machine.call("send", 5_000, (0, 1)) == pytest.approx(51, rel=0.1)
    assert machine.call("send", 20_000, (0, 1)) == pytest.approx(201)
    assert machine.call("all_reduce", 10_000, range(2)) == 202
    assert machine.memory_gb == 1.0


def test_single_rank_profile_plans_only_one_rank():
    alone = profile(calls=[])
    assert alone.machine(1).call("send", 5, (0,)) == 0
    with pytest.raises(ValueError, match=r"mpirun -np 2.*--machine"):
        alone.machine(2)


@pytest.mark.parametrize(
    ("how", "line"),
    [({"graph": "other"}, "has changed since"), ({"pieces": {}}, "not contain the same pieces")],
)
def test_profile_that_does_not_match_the_model_is_rejected(how, line):
    with pytest.raises(ValueError, match=line):
        costs(**how)


def test_profile_round_trips(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(profile().text())
    assert measured_profile.load(path) == profile()


def test_profile_of_an_earlier_version_names_no_device(tmp_path):
    path, tree = tmp_path / "profile.json", json.loads(profile(device="CPU").text())
    assert tree.pop("device") == "CPU"
    path.write_text(json.dumps(tree))
    assert measured_profile.load(path) == profile()


def changed(**fields):
    tree = json.loads(profile().text())
    return json.dumps({**tree, **fields})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "not valid JSON"),
        ("[]", "is not a profile"),
        (changed(version=0), "is not a profile"),
        (changed(rows=[2, 1]), "rows is missing or invalid"),
        (changed(rows=[2, 4]), "rows is missing or invalid"),
        (changed(rows=[1, 2]), "one value for each entry of `rows`"),
        (changed(pieces={"a": [[1.0]]}), "pieces is missing or invalid"),
        (changed(pieces={"a": [[-1.0], [1.0]]}), "pieces is missing or invalid"),
        (changed(pieces={"a": [[1.0]] * 2, "b": [[1.0]] * 3}), "pieces is missing or invalid"),
        (changed(device=7), "device is missing or invalid"),
        (changed(run={"forward": 1.0}), "run is missing or invalid"),
        (changed(calls=[{"op": "send"}]), "calls is missing or invalid"),
        (changed(calls=[{**CALLS[0], "seconds": [1.0]}]), "calls is missing or invalid"),
        (changed(memory=float("nan")), "memory is missing or invalid"),
    ],
)
def test_invalid_profile_is_rejected(text, line, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=line) as error:
        measured_profile.load(path)
    assert "\n" not in str(error.value)
