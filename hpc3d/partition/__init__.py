"""Partitioning of any model into pipeline stages, from the costs of its operations to a plan."""


def main(argv: list[str] | None = None) -> int:
    """Run `python -m hpc3d.partition`."""
    from hpc3d.partition.__main__ import main

    return main(argv)
