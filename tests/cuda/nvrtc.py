"""NVIDIA's run-time compiler from its wheel: compiles kernels without a GPU or a driver."""

import ctypes
import importlib.util
import re
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from hpc3d.cuda import launch_table

WHEELS = "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12"
NUMBERS = "ptxas info", "ptxas   "  # how the lines of its statistics begin
OLD = "Architectures prior to"  # a warning about sm_70 that no option turns off


class Refused(Exception):
    """Source that does not compile without warnings, with the compiler's message."""


class Code(NamedTuple):
    """Machine code for one architecture, its PTX, and the report of the assembler."""

    cubin: bytes
    ptx: str
    report: str

    @property
    def spilled(self):
        """Number of register spill bytes of all kernels."""
        return sum(map(int, re.findall(r"(\d+) bytes spill", self.report)))


def folder(part):
    """Return the folder of a CUDA component in the wheels, or None if it is not installed."""
    try:
        found = importlib.util.find_spec(f"nvidia.{part}")
    except ModuleNotFoundError:
        return None
    return found and Path(next(iter(found.submodule_search_locations)))


class Compiler:
    """Compiler with the options of launches."""

    @staticmethod
    def missing():
        """Return the missing component, or None."""
        here = folder("cuda_nvrtc") and folder("cuda_runtime")
        return None if here else f"{' and '.join(WHEELS)}: pip install 'hpc3d[test]'"

    @cached_property
    def nvrtc(self):
        library = ctypes.CDLL(str(folder("cuda_nvrtc") / "lib" / "libnvrtc.so.12"))
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library

    @property
    def version(self):
        numbers = ctypes.c_int(), ctypes.c_int()
        self.do("Version", *map(ctypes.byref, numbers))
        return f"{numbers[0].value}.{numbers[1].value}"

    def compile(self, text, instances, architecture):
        """Return the Code of `instances` for an architecture such as "sm_90", or raise Refused."""
        program = ctypes.c_void_p()
        self.do("CreateProgram", ctypes.byref(program), text.encode(), b"kernels", 0, None, None)
        try:
            for instance in instances:
                self.do("AddNameExpression", program, instance.encode())
            options = self.options(architecture)
            failed = self.nvrtc.nvrtcCompileProgram(program, len(options), options)
            report = self.result("ProgramLog", program).decode().replace("\0", "")
            if failed or complaints(report):
                raise Refused(complaints(report))
            ptx = self.result("PTX", program).decode()
            return Code(self.result("CUBIN", program), ptx, report)
        finally:
            self.do("DestroyProgram", ctypes.byref(program))

    def options(self, architecture):
        headers = folder("cuda_runtime") / "include"
        flags = [f"--gpu-architecture={architecture}", "--ptxas-options=-v", *launch_table.OPTIONS]
        flags += [f"--include-path={path}" for path in (headers, launch_table.FOLDER)]
        return (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))

    def do(self, what, *arguments):
        code = getattr(self.nvrtc, f"nvrtc{what}")(*arguments)
        assert not code, self.nvrtc.nvrtcGetErrorString(code).decode()

    def result(self, what, program):
        """Return the bytes of one of the results of a program."""
        size = ctypes.c_size_t()
        self.do(f"Get{what}Size", program, ctypes.byref(size))
        taken = ctypes.create_string_buffer(size.value)
        self.do(f"Get{what}", program, taken)
        return taken.raw


def complaints(report):
    """Return the lines of a report that are not the assembler's numbers."""
    lines = [line for line in report.splitlines() if line and not line.startswith(NUMBERS)]
    return "\n".join(line for line in lines if OLD not in line)
