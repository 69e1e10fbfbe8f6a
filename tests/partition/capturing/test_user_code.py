"""User code leaves no side effects, and its exceptions are reported on one line."""

import logging
import re
import warnings

import pytest

pytest.importorskip("torch")

import torch

from hpc3d.partition.capturing.user_code import described, undisturbed, without_data


def test_error_is_described_in_one_line():
    assert described(KeyError()) == "KeyError"
    assert described(ValueError("a\nb")) == "ValueError: a"


def test_error_description_has_the_line_of_the_user():
    with pytest.raises(ValueError) as found:
        raise ValueError("no")
    assert re.fullmatch(r"ValueError: no \(.*test_user_code.py:\d+\)", described(found.value))


def test_user_code_output_random_state_and_logs_are_isolated(capfd, caplog):
    before = torch.get_rng_state()
    with undisturbed():
        print("hello")
        warnings.warn("hello", stacklevel=1)
        logging.warning("hello")
        torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())
    assert capfd.readouterr() == ("", "") and not caplog.records
    logging.warning("hello")
    assert caplog.records


def test_tensors_are_created_without_data():
    with without_data():
        assert torch.empty(10**9, 10**6).shape == (10**9, 10**6)
