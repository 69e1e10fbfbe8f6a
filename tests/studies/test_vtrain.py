"""Predictions of vTrain's published steps from a tenth of them, and layouts chosen by vTrain."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpc3d.predict.machine.machine import Rates
from hpc3d.predict.machine.machine_file import load
from hpc3d.studies.vtrain import (
    COMPOSED,
    EVERY,
    MEASURED,
    ROW,
    Profile,
    ProfileFactors,
    Steps,
    calibrate,
    read,
    with_values,
)
from hpc3d.studies.vtrain_report import bends, choices
from tests.predict.fixed import MACHINE as FIXED

INPUTS = Path(__file__).parents[2] / "inputs"
ROWS = INPUTS / "published" / "vtrain-single.csv.gz"
MACHINE = INPUTS / "machines" / "a100-vtrain.toml"


@pytest.fixture(scope="module")
def rows():
    return read(ROWS)


def test_published_rows_are_linear_in_the_layers(rows):
    """They are on straight lines to the last digit, so they were not measured by a clock."""
    assert bends(rows) < 2e-6
    bent = rows.copy()
    place = np.flatnonzero((rows["d"] == 1) & (rows["layers"] == 16))[0]
    bent["ms"][place] += 0.001
    assert bends(bent) == pytest.approx(0.002, rel=0.01)


@pytest.mark.slow
def test_known_machine_and_profile_factors_are_recovered(rows):
    """The steps are generated with known values; a profile without a row has the factor 1."""
    few = rows[::EVERY].copy()
    truth = ProfileFactors(*with_values(load(MACHINE), (30e-6, 7e11, 2.5)), {})
    steps = Steps(few)
    few["ms"] = steps.seconds(truth) * 1e3
    alone = calibrate(few, load(MACHINE), profiles=False)
    assert alone.odd == pytest.approx(truth.odd, rel=1e-3)
    assert alone.machine.launch_s == pytest.approx(30e-6, rel=1e-3)
    assert alone.machine.kernels["attend"] == pytest.approx(7e11, rel=1e-3)
    slow = steps.profiles[0]
    few["ms"] = steps.seconds(truth._replace(factors={slow: 1.2})) * 1e3
    factors = calibrate(few, load(MACHINE)).factors
    assert factors.pop(slow) == pytest.approx(1.2, rel=0.02)
    # The machine takes over a small part of what the profiles have in common.
    assert [*factors.values()] == pytest.approx([1.0] * len(factors), abs=0.02)


def test_recomputation_adds_a_forward_pass_and_padding_adds_tokens():
    """A rank's part of the vocabulary is a multiple of 128: 50304 tokens on 1 rank, 50688 on 4."""
    block, again = (Profile(1024, 16, 1024, 4, 1).work(each) for each in (COMPOSED, MEASURED))
    both = block["block"].forward + block["block"].backward
    assert again["block"].backward == both
    assert again["block"].forward == block["block"].forward
    assert [MEASURED.vocabulary(t) for t in (1, 2, 4)] == [50304, 50432, 50688]
    assert [COMPOSED.vocabulary(t) for t in (1, 2, 8)] == [50257, 50256, 50256]


def test_step_time_is_the_sum_of_passes_messages_reduction_and_update():
    """There are two nodes of 8 GPUs, with a replica of 8 tensor ranks or a stage on each."""
    machine = replace(FIXED, gemm={"float16": Rates(1e12, (1.0,), (1e12,))})
    rows = [(16, 4, 1, 128, 8, 4, 64, 8, 2, 1, 1.0), (16, 4, 1, 128, 8, 4, 64, 2, 4, 2, 1.0)]
    calibration = ProfileFactors(machine, 1.0, {Profile(128, 8, 64, 8, 1): 3.0})
    found = Steps(np.array(rows, ROW)).seconds(calibration)
    for t, d, micros, blocks, factor, step in (
        (8, 2, 2, 4, 3, found[0]),
        (2, 4, 1, 2, 1, found[1]),
    ):
        work = Profile(128, 8, 64, t, 1).work(COMPOSED)
        held = work["embedding"].parameters + blocks * work["block"].parameters
        across = (0, 8) if d == 2 else (0, 2, 4, 6)
        seconds = machine.call("all_reduce", 4 * (1 - 1 / d) * held, across)
        seconds += machine.kernel("adamw", 22 * held)
        for name, times, slower in (("embedding", 1, 1), ("block", 4, factor), ("head", 1, 1)):
            for asked in (work[name].forward, work[name].backward):
                computation, calls = calibration.seconds(asked)
                seconds += micros * times * (slower * computation + calls)
        if d == 4:
            seconds += 2 * machine.call("send", 2 * 64 * 128, (0, 8))
        assert step == pytest.approx(seconds, rel=1e-12)


def test_choices_select_the_best_prediction_and_report_the_loss(rows):
    """The second prediction prefers the slower one of two layouts of a model."""
    same = (rows["ranks"] == 2) & (rows["hidden"] == 1024) & (rows["layers"] == 24)
    two = rows[same & (rows["batch"] == 2)]
    order = np.argsort(two["ms"])
    (good,) = choices(two, two["ms"])
    (bad,) = choices(two, -two["ms"])
    assert (good.chosen, good.best, good.among, good.loss) == (order[0], order[0], 2, 0)
    assert bad.chosen == order[1]
    assert bad.loss == pytest.approx(two["ms"].max() / two["ms"].min() - 1)


NAMES = "# GPUs,global batch,..."
GOOD = "8,32,4,1024,16,24,1024,2,2,2,219.7"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "8,32,4,1024,16,24,1024,2,2,1,219.7",
            "row 3: ranks = 8: must equal t d p = 2 x 2 x 1; corr",
        ),
        (
            "8,32,3,1024,16,24,1024,2,2,2,219.7",
            "row 3: batch = 32: must be divisible by d x micro; ",
        ),
        ("8,32,4,1024,16,25,1024,2,2,2,219.7", "row 3: layers = 25: must be divisible by p; corr"),
        ("8,32,4,1024,16,24,1024,2,2,2,-1.5", "row 3: ms = -1.5: must be positive; correct or"),
        ("8,32,4,1024,16,24,1024,2,2,2,nan", "row 3: ms = nan: must be positive; correct or"),
        ("0,32,4,1024,16,24,1024,0,2,2,1.5", "row 3: ranks = 0: must be positive; correct or"),
        ("8,32,4,1024,16,24,1024,2,2,219.7", "the columns are ranks, batch, micro"),
        ("a,32,4,1024,16,24,1024,2,2,2,1.5", "the columns are ranks, batch, micro"),
    ],
)
def test_invalid_rows_are_rejected(tmp_path, line, message):
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([NAMES, GOOD, GOOD, line] + [GOOD] * 30))
    with pytest.raises(ValueError, match=r"rows\.csv") as refusal:
        read(path)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_files_without_rows_are_rejected(tmp_path):
    whole = ROWS.read_bytes()
    files = {"empty.csv": b"", "few.csv": f"{NAMES}\n{GOOD}".encode(), "cut.csv.gz": whole[:9000]}
    files |= {"text.csv.gz": b"no gzip", "broken.csv.gz": whole[:5000] + b"x" * 50 + whole[5050:]}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    for name in [*files, "absent.csv", "."]:
        with pytest.raises(ValueError, match="; ") as refusal:
            read(tmp_path / name)
        assert str(refusal.value).startswith(str(tmp_path / name) + ": ")
        assert "\n" not in str(refusal.value)
        assert ".;" not in str(refusal.value)
    with pytest.raises(ValueError, match=r"/absent.csv: No such file or directory; use a CSV"):
        read(tmp_path / "absent.csv")


def test_compressed_and_plain_files_are_read_equally(tmp_path, rows):
    path = tmp_path / "rows.csv"
    path.write_bytes(gzip.decompress(ROWS.read_bytes()))
    assert (read(path) == rows).all()
    assert rows.dtype == ROW
