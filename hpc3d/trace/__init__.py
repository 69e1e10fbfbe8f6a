"""HDF5 traces of measured and simulated runs, with the time and bytes of every event."""


def __getattr__(name):
    """Import `open` lazily, so that ranks that only record events do not load the reader."""
    if name != "open":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hpc3d.trace.reader import open

    return open
