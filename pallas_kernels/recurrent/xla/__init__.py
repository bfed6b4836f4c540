"""Recurrent layers in plain XLA: fast on a CPU, correct anywhere."""
