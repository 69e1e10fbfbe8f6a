"""What the imbalance of experts cost, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc3d.analyze.report.table_format import percent, prefixed, seconds


def in_words(cost: Mapping[str, Any]) -> str:
    """A row of the table expert_cost as sentences, without what is not known."""
    return " ".join([_lost(cost), *_waited(cost)])


def _lost(cost):
    lost = f"{percent(cost['dropped'])} of the choices found no slot and were dropped"
    if cost["empty"] is None:
        return f"{lost}."
    return (
        f"{lost} (at an even load: {percent(cost['dropped_even'])}), and {percent(cost['empty'])}"
        f" of the slots stayed empty (at an even load: {percent(cost['empty_even'])}), which took"
        f" {prefixed(cost['empty_flop'])}FLOP of a step, forward and backward."
    )


def _waited(cost):
    if cost["wait_s"] is None:
        return
    share = "" if cost["wait_share"] is None else f" ({percent(cost['wait_share'])} of its step)"
    several = "s" * (" " in cost["experts"])
    yield (
        f"In dispatch and combine a mean rank waited {seconds(cost['wait_s'])}{share},"
        f" longest for rank {cost['rank']}, whose expert{several} {cost['experts']} had"
        f" {cost['load']:.2f} times the mean load."
    )
