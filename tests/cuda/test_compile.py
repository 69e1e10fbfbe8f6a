"""Every instance of every CUDA kernel compiles, without a GPU."""

import re
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from multiprocessing import get_context

import pytest

from hpc3d.cuda import launch_table
from tests.cuda.nvrtc import Compiler, Refused
from tests.strided import strided

# Volta has no bfloat16.
ARCHITECTURES = {
    "sm_70": ["float32", "float16"],
    "sm_80": launch_table.REALS,
    "sm_90": launch_table.REALS,
}
COMPILER = Compiler()


@pytest.fixture(scope="module", autouse=True)
def wheels():
    if missing := COMPILER.missing():
        pytest.skip(f"CUDA kernels are not compiled without {missing}")


def instances(source, reals):
    """Return the instances of a source file for which T is one of `reals`."""
    ours = [kernel for kernel in launch_table.kernels().values() if kernel.source == source]
    return [*dict.fromkeys(kernel.expression(real) for kernel in ours for real in reals)]


def spilled(source, architecture):
    """Return the register spill bytes of the kernels in a source file."""
    listed = instances(source, ARCHITECTURES[architecture])
    return COMPILER.compile(launch_table.text(source), listed, architecture).spilled


def digest(source, architecture):
    """Return the digest of everything that affects the result."""
    headers = sorted(path.read_text() for path in launch_table.FOLDER.glob("*.cuh"))
    listed = instances(source, ARCHITECTURES[architecture])
    texts = [launch_table.text(source), *headers, *launch_table.OPTIONS, *listed]
    texts += [architecture, COMPILER.version]
    return sha256("\0".join(texts).encode()).hexdigest()


@pytest.fixture(scope="module")
def outcomes(request):
    """Return `spilled` of every requested source and architecture, computed two at a time. Sources
    that the same compiler has compiled before without spilling are skipped."""
    passed = request.config.cache.mkdir("cuda-compiled")
    names = {item.name for item in request.session.items}
    pairs = [
        (source, name)
        for name in ARCHITECTURES
        for source in launch_table.sources()
        if any(f"[{source}-{name}]" in each for each in names)
    ]
    marks = {pair: passed / digest(*pair) for pair in pairs}
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        new = {pair: pool.submit(spilled, *pair) for pair in pairs if not marks[pair].exists()}
    for pair, outcome in new.items():
        if not outcome.exception() and not outcome.result():
            marks[pair].touch()
    return new


@pytest.mark.slow
@pytest.mark.parametrize("architecture", strided(ARCHITECTURES, 3, 1))
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(each, marks=[pytest.mark.slow] * (each not in ("norm", "optimizer")))
        for each in launch_table.sources()
    ],
)
def test_kernels_compile_without_register_spills(source, architecture, outcomes):
    pair = source, architecture
    assert pair not in outcomes or outcomes[pair].result() == 0


@pytest.mark.parametrize("real", launch_table.REALS)
def test_memory_accesses_are_16_bytes_wide(real):
    code = COMPILER.compile(
        launch_table.text("rows"), [f"add<{launch_table.REALS[real]}>"], "sm_90"
    )
    assert len(re.findall(r"ld\.global\.v4\.[bfu]32", code.ptx)) == 2
    assert len(re.findall(r"st\.global\.v4\.[bfu]32", code.ptx)) == 1


def test_misspelled_variable_is_a_compile_error():
    text = launch_table.text("rows").replace("a[i] += b[i];", "a[i] += c[i];")
    with pytest.raises(Refused, match="c"):
        COMPILER.compile(text, ["add<float>"], "sm_80")


@pytest.mark.parametrize(
    ("text", "instance", "said"),
    [
        ("template <typename T> __global__ void f(T* x) { *x = 1 }", "f<float>", 'expected a ";"'),
        ("template <typename T> __global__ void f(T* x) { *x = 1; }", "f<double>, g", "g"),
        ("__global__ void f(float* x) { int unused = 1; *x = 1; }", "f", "unused"),
        ('#include "nothing.cuh"\n__global__ void f() {}', "f", "nothing.cuh"),
        (
            "__global__ void f(float* x) { __shared__ float s[20000]; *x = s[int(*x)]; }",
            "f",
            "too much",
        ),
    ],
    ids=["syntax", "instance", "warning", "include", "shared memory"],
)
def test_compile_and_link_errors_are_reported(text, instance, said):
    with pytest.raises(Refused, match=said):
        COMPILER.compile(text, instance.split(", "), "sm_70")


def test_register_spills_are_counted():
    terms = " ".join(f"float a{i} = x[{i} * n];" for i in range(90))
    sums = " ".join(f"x[{i} * n + 1] = a{i} * a{(i * 7 + 3) % 90};" for i in range(90))
    text = f"__global__ void __launch_bounds__(1024, 2) f(float* x, int n) {{ {terms} {sums} }}"
    assert COMPILER.compile(text, ["f"], "sm_80").spilled > 0
