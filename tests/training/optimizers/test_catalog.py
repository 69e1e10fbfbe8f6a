"""The list of optimizers, and the keys of each."""

from typing import get_args, get_type_hints

import pytest

from hpc3d.comm.threads import run
from hpc3d.config.input_file import CONSTANTS, OPTIMIZER_KEYS, TrainConfig
from hpc3d.training.optimizers.catalog import OPTIMIZERS
from tests.pipeline.mixes import config_of, trainer_of


def test_input_file_can_name_every_optimizer():
    assert {*get_args(get_type_hints(TrainConfig)["optimizer"])} == {*OPTIMIZERS}
    assert {*CONSTANTS} == {*OPTIMIZERS}
    assert {key for keys in CONSTANTS.values() for key in keys} == {*OPTIMIZER_KEYS}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_receives_the_keys_it_uses(name):
    given = {key: 0.5 for key in CONSTANTS[name]}
    words = " ".join(f"{key}={value}" for key, value in given.items())

    def constants(mesh, line):
        optimizer = trainer_of(mesh, config_of(f"optimizer={name} {line}")).optimizer
        if name == "muon":  # beta1 is of its matrices, not of what it updates as AdamW
            return {**optimizer.constants, "beta1": optimizer.momentum}
        return optimizer.constants

    assert run({}, lambda mesh: constants(mesh, words)) == [given]
    assert run({}, lambda mesh: constants(mesh, "")) == [CONSTANTS[name]]
