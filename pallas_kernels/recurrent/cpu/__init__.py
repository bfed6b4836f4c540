"""Recurrent operations by kernels that numba compiles. Only `operations` and `units` need no numba."""
