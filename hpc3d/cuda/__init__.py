"""CUDA: streams, graphs, cuBLASLt, cuDNN and custom kernels."""
