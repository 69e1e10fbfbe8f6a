"""Training Transformers on a cube of MPI ranks: 1-D, 2-D, 2.5-D and 3-D in one algebra."""

__version__ = "0.1.0"
