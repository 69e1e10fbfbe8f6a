"""Which optimisers there are, and the keys of each."""

from typing import get_args, get_type_hints

from hpc3d.config.input_file import TrainConfig
from hpc3d.training.optimizers import OPTIMIZERS


def test_an_input_file_can_name_every_optimiser():
    assert {*get_args(get_type_hints(TrainConfig)["optimizer"])} == {*OPTIMIZERS}
