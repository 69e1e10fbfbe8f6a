"""Traces of runs: time and bytes of every event in one HDF5 schema, measured or simulated."""


def __getattr__(name):
    """Import `hpc3d.trace.open` on access, so that ranks that only record do not load it."""
    if name != "open":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hpc3d.trace.reader import open

    return open
