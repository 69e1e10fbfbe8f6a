"""Sentences on the cost of expert imbalance, with known and unknown values."""

from hpc3d.analyze.report.expert_words import in_words

COST = {"dropped": 0.25, "dropped_even": 0.0, "empty": 0.4, "empty_even": 0.2, "empty_flop": 4.4e8}
COST |= {"wait_s": 0.004, "wait_share": 0.04, "rank": 3, "experts": "4 to 7", "load": 1.25}
LOST = (
    "25.0% of the routed tokens exceeded the capacity and were dropped (0.0% with a balanced"
    " load), and 40.0% of the capacity was unused (20.0% with a balanced load). The"
    " unused capacity costs 440 MFLOP per step (forward and backward)."
)


def test_expert_summary_reports_losses_and_waits():
    assert in_words(COST) == (
        f"{LOST} In dispatch and combine, ranks waited 4.00 ms per step on average"
        " (4.0% of step time), most of all for rank 3, whose experts 4 to 7 had 1.25 times the"
        " mean load."
    )
    assert "whose expert 4 had" in in_words(COST | {"experts": "4"})


def test_expert_summary_omits_unknown_values():
    assert in_words(COST | {"wait_s": None}) == LOST
    few = in_words(COST | {"wait_s": None, "empty": None})
    assert few == "25.0% of the routed tokens exceeded the capacity and were dropped."
