"""Pallas GPU kernels (Mosaic GPU) of the recurrent operations: steps of decodes, states in place."""
