"""Run the cases of one part: python -m tests.gpu.child PART FILE [--quick] [--fake]

Cases that are in FILE are skipped: if the process of a part dies, a new one runs the other cases.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

from tests.gpu.notes import Notes, Skip
from tests.gpu.parts import PARTS

DEVICE_LOST = 70  # after a fault on the device nothing that this process does there is right


def main(name, path, *options):
    part = next(part for part in PARTS if part.name == name)
    notes, quick, fake = Notes(Path(path)), "--quick" in options, "--fake" in options
    try:
        device = opened(fake) if part.device else None
    except Skip as skip:
        notes.write("skipped", reason=str(skip))
        return 0
    module = import_module(f"tests.gpu.{name}")
    if hasattr(module, "run"):
        return module.run(notes, device, quick, begun(notes.path))
    return made(notes, device, list(module.cases(device, quick)))


def made(notes, device, cases):
    """Run the remaining cases; return the exit code."""
    done = begun(notes.path)
    notes.write("cases", names=[case for case, _ in cases])
    for case, function in cases:
        if case in done:
            continue
        notes.run(case, function)
        if device is not None and not device.alive():
            return DEVICE_LOST
    return 0


def opened(fake):
    """Return the GPU, or its replacement."""
    if fake:
        from tests.gpu.fake import Fake

        return Fake()
    from tests.gpu.device import Gpu

    return Gpu()


def begun(path):
    events = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {event["case"] for event in events if event["event"] == "begin"}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
