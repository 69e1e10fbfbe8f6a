"""Plan files: written, read, and rejected if they do not match the model."""

import json

import pytest

pytest.importorskip("torch")

from hpc3d.partition import plan_file
from hpc3d.partition.capture import capture, captured_of
from hpc3d.partition.plan_file import SavedPlan, digest_of, names_of
from tests.partition.execution.modules import HERE, even_parts, prepared
from tests.partition.sample_models import Function

CHAIN = f"{HERE}:chain"


def plan_of(model, replicas, micros, schedule, chunks=1, recompute=False, **how):
    """Return the plan of a model in equal parts."""
    dtype = how.get("dtype")
    captured = captured_of(model, dtype) if dtype else prepared(model)[-1]
    count = len(replicas) * chunks
    return SavedPlan(
        model=model,
        graph=digest_of(captured),
        batch=captured.batch,
        microbatches=micros,
        schedule=schedule,
        chunks=chunks,
        zero=how.pop("zero", 0),
        replicas=[*replicas],
        recompute=[recompute] * count,
        parts=[
            [names_of(captured)[piece] for piece in part] for part in even_parts(captured, count)
        ],
        predicted=how.pop("predicted", {}),
        **how,
    )


def saved():
    return plan_of(CHAIN, (1, 1), 2, "1f1b")


def test_plan_round_trips(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(saved().text())
    found = plan_file.load(path)
    assert found == saved()
    _, _, captured = prepared(CHAIN)
    assert found.pieces(captured) == [[*part] for part in even_parts(captured, 2)]


def test_plan_without_a_data_type_is_read(tmp_path):
    """Plans of earlier versions have none."""
    path, tree = tmp_path / "plan.json", json.loads(saved().text())
    del tree["dtype"]
    path.write_text(json.dumps(tree))
    assert plan_file.load(path) == saved()


def test_plan_without_tensor_parallelism_is_read(tmp_path):
    """Files of earlier versions do not have this field."""
    path, fields = tmp_path / "plan.json", json.loads(saved().text())
    del fields["tensor"]
    path.write_text(json.dumps(fields))
    assert plan_file.load(path) == saved()
    assert saved()._replace(tensor=3).ranks == 6


def test_digest_depends_on_the_computation_not_on_the_batch():
    """It depends on operations, constants and shapes, but not on the batch or on values."""
    import torch

    def digest(function, width=4, batch=6):
        return digest_of(capture(Function(function), (torch.rand(batch, width),)))

    plain = digest(lambda y, x: y * 2)
    assert digest(lambda y, x: y * 2, batch=8) == plain
    assert digest(lambda y, x: y * 3) != plain
    assert digest(lambda y, x: y + 2) != plain
    assert digest(lambda y, x: x - y) != digest(lambda y, x: y - x)


def test_plan_of_another_model_is_rejected():
    _, _, other = prepared(f"{HERE}:everything")
    with pytest.raises(ValueError, match="has changed since the plan was made"):
        saved().pieces(other)
    _, _, captured = prepared(CHAIN)
    with pytest.raises(ValueError, match="not contain the same pieces"):
        saved()._replace(parts=[["tanh"], ["linear"]]).pieces(captured)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"format": "else"}, "is not a plan of this version"),
        ({"version": 2}, "is not a plan of this version"),
        ({"batch": 0}, "batch is missing or invalid"),
        ({"microbatches": True}, "microbatches is missing or invalid"),
        ({"zero": 2}, "zero is missing or invalid"),
        ({"replicas": []}, "replicas is missing or invalid"),
        ({"replicas": [1, -1]}, "replicas is missing or invalid"),
        ({"parts": [["a"], []]}, "parts is missing or invalid"),
        ({"recompute": [1, 0]}, "recompute is missing or invalid"),
        ({"chunks": 2}, "parts are inconsistent"),
        ({"dtype": "int8"}, "dtype is missing or invalid"),
        ({"model": None}, "model is missing or invalid"),
    ],
)
def test_invalid_plan_is_rejected(change, line, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(saved().text()) | change))
    with pytest.raises(ValueError, match=f"{line}.*; use a file written by"):
        plan_file.load(path)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000])
def test_plan_file_must_be_json(content, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="; use a file written by"):
        plan_file.load(path)
