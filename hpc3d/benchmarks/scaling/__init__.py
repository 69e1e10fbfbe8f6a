"""Weak and strong scaling of tensor parallelism, predicted and measured."""
