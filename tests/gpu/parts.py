"""The parts of the GPU check; cheap and informative ones come first."""

from typing import NamedTuple

MACHINE_FILE = "machine file"  # the case that writes it, and its fact


class Part(NamedTuple):
    """Module of this package with `cases(device, quick)`, which runs in its own process.

    The part may take `limit` seconds, and each of its cases `case_limit`. Earlier parts cannot use
    `reserved` of these seconds. `device` is True if the part requires a GPU.
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
    Part("modules", 150, 120),
    Part("rates", 90, 40),
    Part("benchmark", 260, 120, reserved=200),
)
