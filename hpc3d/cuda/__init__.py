"""CUDA: streams, graphs, cuBLASLt, cuDNN and our own kernels."""
