"""Execution of the stages of a plan on the engine of hpc3d.pipeline, or with torchrun."""
