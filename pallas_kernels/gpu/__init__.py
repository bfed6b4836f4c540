"""Pallas GPU kernels (Mosaic GPU) of the operations."""
