"""What `python -m hpc3d.bench` measures and predicts."""
