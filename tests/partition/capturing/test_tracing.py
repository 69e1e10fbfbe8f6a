"""Tracing of modules, and modules that cannot be traced."""

import copy

import pytest

pytest.importorskip("torch")

import torch

from hpc3d.partition.capture import capture
from tests.partition.sample_models import HERE, Function, captured


def test_capture_changes_neither_the_module_nor_the_generator():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
        capture(module, (torch.ones(4, 4),))
        assert torch.equal(torch.get_rng_state(), state)
        for name, value in module.state_dict().items():
            assert value.device.type == "cpu" and torch.equal(value, before[name])


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("decides", r"cannot be captured: .*sample_models.py:\d+"),
        ("nothing", "must return an nn.Module, a tuple or dict"),
        ("leaves", "raised SystemExit: 3"),
        ("picks", r"the size of a tensor depends on the values .*sample_models.py:\d+\)"),
        ("halves", r"autocast to 16-bit .*sample_models.py:\d+\)"),
        ("trains_itself", r"writes to one of its parameters; .* mul_ \(.*models.py:\d+\)"),
        ("rounds", r"Rounded defines a custom backward pass.*sample_models.py:\d+\)"),
        ("maps", r"transformations of torch.func: .* \(.*sample_models.py:\d+\); move this code"),
        ("contrasts", r"two batch dimensions; .*sample_models.py:\d+\)"),
        ("fixes_its_batch", "the code assumes a fixed batch size"),
        ("fails", r"raised RuntimeError: no such size \(.*sample_models.py:\d+\)"),
        ("without_batch", "must be a tensor with the batch"),
        ("one_sample", "a batch size .* of at least 2"),
        ("absent", "has no function absent"),
    ],
)
def test_uncapturable_module_is_rejected_in_one_line(name, line):
    with pytest.raises(ValueError, match=line) as found:
        captured(f"{HERE}:{name}")
    assert len(str(found.value).splitlines()) == 1


def test_model_that_writes_to_its_input_is_rejected():
    with pytest.raises(ValueError, match=r"writes to one of its inputs; .* add_ \(.*\.py:\d+\)"):
        capture(Function(lambda y, x: y + x.add_(1)), (torch.ones(6, 4),))
