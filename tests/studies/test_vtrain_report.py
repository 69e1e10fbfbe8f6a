"""The report of vTrain's published steps, with predictions."""

import pytest

from hpc3d.predict.machine.machine_file import load
from hpc3d.studies.vtrain_report import report
from tests.studies.test_vtrain import INPUTS, MACHINE, ROWS

MANY_NODES = INPUTS / "published" / "vtrain-multi.csv.gz"


@pytest.fixture(scope="module")
def found():
    return report(ROWS, MANY_NODES, MACHINE)


@pytest.mark.slow
def test_steps_and_chosen_layouts_are_accurate(found):
    """Mean 10 %, median 6 %; the chosen layout of each model is within 3 % of the best."""
    result = found["with a factor a profile"]
    assert found["calibrate"] * 10 <= found["rows"] == 1440
    assert result["errors"]["all"]["mean"] <= 0.10
    assert result["errors"]["all"]["median"] <= 0.06
    assert result["choices"]["models"] == result["choices"]["close"] == 144
    assert result["choices"]["worst"] <= 0.03


@pytest.mark.slow
def test_machine_without_profile_factors_reaches_the_mean_error(found):
    """No profile factors are used, and the fitted values are plausible for an A100."""
    result = found["the machine alone"]
    assert result["errors"]["all"]["mean"] <= 0.10
    assert result["values"]["attention_GB_per_s"] < 2039
    assert 5 < result["values"]["launch_us"] < 100
    assert result["values"]["odd"] > 1


@pytest.mark.slow
def test_machine_file_has_the_calibrated_values(found):
    machine, values = load(MACHINE), found["the machine alone"]["values"]
    assert machine.launch_s * 1e6 == pytest.approx(values["launch_us"], rel=0.05)
    for kernel in ("attend", "attend_again", "attend_grad"):
        assert machine.kernels[kernel] / 1e9 == pytest.approx(
            values["attention_GB_per_s"], rel=0.05
        )


@pytest.mark.slow
def test_multi_node_steps_are_predicted_from_single_node_ones(found):
    """Fitted to rows of one node; predictions of the largest models are the most accurate."""
    errors = found["measured"]["errors"]
    assert errors["all"]["mean"] <= 0.10
    assert errors["all"]["median"] <= 0.06
    assert errors["hidden 12288"]["max"] <= 0.06
