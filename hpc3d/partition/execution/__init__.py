"""Run a plan on hpc3d's pipeline engine, or export it for torchrun."""
