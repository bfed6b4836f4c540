"""Recurrent layers as Pallas TPU kernels."""
