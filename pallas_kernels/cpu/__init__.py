"""Kernels for CPUs: Python compiled by numba, called from jitted code as XLA's custom calls.

Nothing here is imported unless numba is installed: `available.why_not` says why these kernels cannot serve.
"""
