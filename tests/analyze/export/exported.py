"""Exported events of a trace."""

from hpc3d.analyze.export.formats import events_of
from hpc3d.analyze.metrics.wait_states import calls_of


def exported(trace, **steps):
    return events_of(trace, calls_of(trace), **steps)
