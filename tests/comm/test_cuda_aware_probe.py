"""The doctor's checks of GPUs, with a fake CuPy."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hpc3d.comm import cuda_aware_probe
from hpc3d.runtime.finding import FAIL, OK, WARN, Finding
from tests.diagnose.planted import only, script
from tests.mpi import ROOT

CUPY = """
from types import SimpleNamespace
__version__ = "14.2.0"
class runtime:
    driverGetVersion = staticmethod(lambda: {driver})
    runtimeGetVersion = staticmethod(lambda: 12090)
    getDeviceCount = staticmethod(lambda: 2)
    getDeviceProperties = staticmethod(
        lambda number: dict(name=b"H200", major=9, minor=0, totalGlobalMem=150e9))
cuda = SimpleNamespace(is_available=lambda: {available}, runtime=runtime)
"""


def gpu(folder, available=True, driver=13000, nccl="available = True"):
    """Return the findings with a CuPy that reports this."""
    (folder / "cupy" / "cuda").mkdir(parents=True)
    text = CUPY.format(available=available, driver=driver)
    (folder / "cupy" / "__init__.py").write_text(text)
    (folder / "cupy" / "cuda" / "__init__.py").write_text("")
    nccl += "\ndef get_version():\n    return 23203\n"
    (folder / "cupy" / "cuda" / "nccl.py").write_text(nccl)
    (folder / "ml_dtypes.py").write_text("")
    program = "import json; from hpc3d.comm.cuda_aware_probe import devices"
    program += "; print(json.dumps([finding for finding in devices()]))"
    settings = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=settings, check=True)
    return [Finding(*row) for row in json.loads(done.stdout)]


def test_missing_gpu_backend_is_reported_as_a_note(monkeypatch):
    monkeypatch.setattr(cuda_aware_probe, "find_spec", lambda name: None)
    found = only(cuda_aware_probe.devices())
    assert found.verdict == OK and "pip install" in found.text


def test_doctor_lists_devices_and_versions(tmp_path):
    cuda, *both, nccl = gpu(tmp_path)
    assert cuda[:3] == (OK, "CUDA", "driver for 13.0, runtime 12.9")
    assert both[1][:2] == (OK, "device 1")
    assert re.fullmatch("H200, .* 9.0, 150 GB", both[1].text)
    assert nccl[:3] == (OK, "NCCL", "2.32.3")


@pytest.mark.parametrize(
    ("planted", "verdict", "subject"),
    [
        ({"available": False}, WARN, "GPU"),
        ({"driver": 11080}, FAIL, "CUDA"),
        ({"nccl": "available = False"}, WARN, "NCCL"),
    ],
)
def test_unusable_gpu_is_reported(planted, verdict, subject, tmp_path):
    wrong = [finding for finding in gpu(tmp_path, **planted) if finding.verdict != OK]
    assert only(wrong)[:2] == (verdict, subject)


def test_two_cupy_packages_are_reported(monkeypatch):
    monkeypatch.setattr(cuda_aware_probe, "find_spec", lambda name: True)
    monkeypatch.setattr(
        cuda_aware_probe, "installed", lambda name: "14" if "cuda" in name else None
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(__version__="14", cuda=OFF))
    assert next(cuda_aware_probe.devices())[:2] == (FAIL, "CuPy")


OFF = SimpleNamespace(is_available=lambda: False)


@pytest.mark.parametrize(
    ("does", "verdict", "text"),
    [
        ("echo staged", OK, "host"),
        ("echo taken", OK, "supported"),
        ("echo taken; echo wrong", FAIL, "wrong"),
        ("kill -SEGV $$", FAIL, " -11"),
        ("sleep 60", FAIL, "hangs"),
    ],
)
def test_cuda_aware_mpi_is_detected(does, verdict, text, tmp_path):
    found = only(cuda_aware_probe.aware(script(tmp_path / "mpirun", does), 0.5))
    assert found[:2] == (verdict, "CUDA-aware MPI") and text in found.text
