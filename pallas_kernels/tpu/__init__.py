"""Pallas TPU kernels of the operations."""
