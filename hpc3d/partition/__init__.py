"""Partition a torch module, or a cost-annotated graph, into pipeline stages."""


def main(argv: list[str] | None = None) -> int:
    """Run `python -m hpc3d.partition`."""
    from hpc3d.partition.__main__ import main

    return main(argv)
