"""Device on which a rank computes the stages of a torch module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hpc3d.comm.device_setup import Hardware, hardware

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.cuda.device import Cuda
    from hpc3d.runtime.job import Job


def refuse_without_cuda(job: Job, config: Config) -> None:
    """Exit with an error message on all ranks if a rank needs CUDA, but torch has no device."""
    if config.train.backend == "cupy" and any(job.gather(not torch.cuda.is_available())):
        job.refuse(
            f"train.backend = cupy: PyTorch {torch.__version__} finds no CUDA device; install a "
            "build of PyTorch for CUDA, or use train.backend = numpy"
        )


def torch_hardware(job: Job, config: Config) -> Hardware:
    """Return the device and the transport of this rank, and let torch use the device.

    With `train.backend = cupy`, all ranks exit with an error message if PyTorch has no CUDA.
    """
    refuse_without_cuda(job, config)
    found = hardware(job, config)
    if found.device:
        _share_stream(found.device)
        torch.backends.cuda.matmul.allow_tf32 = config.train.tf32
        torch.backends.cudnn.allow_tf32 = config.train.tf32
    return found


def _share_stream(device: Cuda) -> None:
    """Let torch submit its work to the stream of hpc3d's arrays, so that both run in order."""
    torch.cuda.set_device(device.number)
    torch.cuda.set_stream(torch.cuda.ExternalStream(device.compute.ptr, device.number))


def use_device(job: Job, device: Cuda, pool: Any, tf32: bool) -> None:
    """Compute with the arrays of the DevicePool `pool` on a device, until the job ends."""
    from hpc3d.cuda.gpu import use

    job.exit_hooks.append(device.close)
    use(pool, tf32)


def device_names(job: Job, device: Cuda | None) -> str:
    """Return the names of the devices on which the ranks compute, or "CPU".

    `device` is the CUDA device of this rank. All ranks must call this function.
    """
    return ", ".join(sorted({*job.gather(device.name if device else "CPU")}))
