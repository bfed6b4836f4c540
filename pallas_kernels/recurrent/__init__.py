"""Recurrent layers over the pool of pages: convolutions, Mamba 1 and 2, the gated delta rule.

- `StateLayout`: where the words of a state are;
- `StateTable`: which blocks a step's sequences read, write and keep;
- `causal_conv1d`, `selective_scan`, `ssd`, `gated_delta_rule`, and `conv_delta_rule`, the first and the last
  of them in one: the operations, each with interchangeable implementations; each returns a `StepResult`.
"""

from pallas_kernels.recurrent.operations import (
    causal_conv1d,
    conv_delta_rule,
    gated_delta_rule,
    selective_scan,
    ssd,
)
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_layout import StateLayout
from pallas_kernels.recurrent.state_table import StateTable

__all__ = [
    "StateLayout",
    "StateTable",
    "StepResult",
    "causal_conv1d",
    "conv_delta_rule",
    "gated_delta_rule",
    "selective_scan",
    "ssd",
]
