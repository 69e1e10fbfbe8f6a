"""Stages of a plan as torch modules that run on the engine of hpc3d.pipeline."""
