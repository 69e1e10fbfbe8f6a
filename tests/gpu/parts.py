"""The parts of the GPU check; cheap and informative ones come first."""

from typing import NamedTuple


class Part(NamedTuple):
    """A module of this package with `cases(device, quick)`, in a process of its own.

    It may take `limit` seconds, one of its cases `case_limit`; `reserved` of them no earlier part
    can use up.  `device` says whether it wants a GPU.
    """

    name: str
    limit: float
    case_limit: float
    reserved: float = 0.0
    device: bool = True


PARTS = (
    Part("environment", 60, 40, device=False),
    Part("loader", 80, 40),
    Part("kernels", 100, 30),
    Part("sizes", 60, 25),
    Part("products", 60, 25),
    Part("attention", 60, 25),
    Part("layers", 70, 40),
    Part("steps", 70, 60),
    Part("nccl", 40, 30),
    Part("graph", 40, 40),
    Part("ranks", 120, 90),
    Part("benchmark", 260, 120, reserved=200),
)
