"""Sentences that describe the cost of expert load imbalance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc3d.analyze.report.table_format import percent, prefixed, seconds


def in_words(cost: Mapping[str, Any]) -> str:
    """Describe a row of the table expert_cost in sentences. Unknown values are omitted."""
    dropped = percent(cost["dropped"])
    text = f"{dropped} of the routed tokens exceeded the capacity and were dropped"
    if cost["empty"] is not None:
        text += (
            f" ({percent(cost['dropped_even'])} with a balanced load), and"
            f" {percent(cost['empty'])} of the capacity was unused ({percent(cost['empty_even'])}"
            f" with a balanced load). The unused capacity costs {prefixed(cost['empty_flop'])}FLOP"
            " per step (forward and backward)"
        )
    if cost["wait_s"] is None:
        return f"{text}."
    share = "" if cost["wait_share"] is None else f" ({percent(cost['wait_share'])} of step time)"
    several = "s" * (" " in cost["experts"])
    return (
        f"{text}. In dispatch and combine, ranks waited {seconds(cost['wait_s'])} per step on"
        f" average{share}, most of all for rank {cost['rank']}, whose expert{several}"
        f" {cost['experts']} had {cost['load']:.2f} times the mean load."
    )
