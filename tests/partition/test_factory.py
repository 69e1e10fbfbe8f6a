"""User functions: their names, calls and error messages."""

from threading import Thread

import pytest

pytest.importorskip("torch")

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hpc3d.partition import factory
from hpc3d.partition.factory import function_at, made, made_model, made_with_data
from tests.partition.execution.modules import HERE as MODULES
from tests.partition.sample_models import HERE
from tests.partition.user_models import HERE as USERS
from tests.partition.user_models import Base


@pytest.mark.parametrize(
    ("call", "inputs"), [("sized(3, batch=4)", (4, 3)), ("sized(batch = 2, width=5)", (2, 5))]
)
def test_factory_accepts_literal_arguments(call, inputs):
    module, (x,) = made(f"{HERE}:{call}")
    assert x.shape == inputs and module.in_features == inputs[1]


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("sized(3", "must be numbers or strings"),
        ("sized(open('a'))", "must be numbers or strings"),
        ("sized(width)", "must be numbers or strings"),
        ("sized(3)(4)", "must be numbers or strings"),
        ("sized(3); 4", "must be numbers or strings"),
        ("sized(*3)", "must be numbers or strings"),
        ("sized(3, depth=2)", "raised TypeError: .*depth"),
        ("absent(3)", "has no function absent"),
    ],
)
def test_invalid_factory_arguments_are_rejected_in_one_line(call, line):
    with pytest.raises(ValueError, match=line) as found:
        made(f"{HERE}:{call}")
    assert len(str(found.value).splitlines()) == 1


def stating(*reductions):
    return torch.nn.Linear(1, 1), (torch.zeros(2, 1),), *reductions


@pytest.mark.parametrize("more", ["'product'", "'sum', 'mean'", "0"])
def test_unknown_reduction_of_the_loss_is_rejected(more):
    with pytest.raises(ValueError, match='optionally, "mean" or "sum", the reduction of the loss'):
        made(f"tests.partition.test_factory:stating({more})")


@pytest.mark.parametrize("name", ["tests", ":f", "no.such.module:f"])
def test_missing_factory_is_rejected(name):
    with pytest.raises(ValueError, match="^" + name.partition(":")[0]):
        made(name)


def test_factory_data_depends_only_on_the_seed():
    """The state of torch's own generator does not change."""
    before = torch.get_rng_state()
    (one, _), (same, _), (other, _) = (
        made_with_data(f"{MODULES}:chain", seed) for seed in (1, 1, 2)
    )
    assert (torch.get_rng_state() == before).all()
    weights = [module.layers[0].weight for module in (one, same, other)]
    assert (weights[0] == weights[1]).all() and (weights[0] != weights[2]).any()


def test_factory_may_convert_the_module_dtype():
    module, _ = made(f"{MODULES}:dropping_in_double")
    assert {each.dtype for each in module.parameters()} == {torch.float64}


@pytest.mark.parametrize("make", [made_model, lambda name, dtype: made_with_data(name, 0, dtype)])
def test_module_and_floating_inputs_are_converted(make):
    module, (x, y), *_ = make(f"{MODULES}:chain", "bfloat16")
    assert {each.dtype for each in (*module.parameters(), x, y)} == {torch.bfloat16}
    _, inputs, *_ = make(f"{MODULES}:everything", "bfloat16")
    assert {each.dtype for each in inputs.values()} == {torch.int64}


def test_factory_that_fails_with_data_is_rejected():
    with pytest.raises(ValueError, match="raised RuntimeError: no such size"):
        made_with_data(f"{HERE}:fails", 0)


@pytest.mark.parametrize("name", ["initialized", "read_rates"])
def test_factory_that_reads_tensor_values_is_called_with_data(name):
    module, _ = made(f"{USERS}:{name}")
    assert all(isinstance(each, FakeTensor) for each in module.parameters()), "data is freed"
    rates = module.rates if name == "initialized" else [module.rate]
    assert all(type(rate) is float for rate in rates)


def test_ranks_create_large_modules_one_after_another(monkeypatch):
    """The parameters of four ranks, 336 bytes each, do not fit in 500 bytes together."""
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    monkeypatch.setattr(factory.host_memory, "total", lambda: 1000)
    rank = Thread(target=made, args=(f"{USERS}:initialized",))
    with factory._alone_on_host():
        rank.start()
        rank.join(0.2)
        assert rank.is_alive()
    rank.join()


def test_other_factories_are_called_without_data():
    module, _ = made(f"{MODULES}:chain")
    assert all(isinstance(each, FakeTensor) for each in module.parameters())


def test_second_error_of_a_factory_is_reported():
    with pytest.raises(ValueError, match=r"raised LookupError: .*: 3.0 \(.*user_models.py:\d+\)$"):
        made(f"{USERS}:fails_with_data")


def test_factory_that_needs_too_much_data_is_rejected(monkeypatch):
    monkeypatch.setattr(factory.host_memory, "total", lambda: 100)
    with pytest.raises(
        ValueError, match=r"DataDependent.*user_models.py:\d+.* 50% of the host mem"
    ):
        made(f"{USERS}:initialized")
    assert made(f"{MODULES}:chain")


def test_wrappers_of_torch_are_removed():
    module, _ = made(f"{USERS}:wrapped")
    real, _ = made_with_data(f"{USERS}:wrapped", 0)
    assert type(module) is type(real) is Base


def test_function_is_called_with_its_literals():
    assert function_at(f"{HERE}:sized(3, batch=4)")()[1].shape == (4, 3)
