"""The implementations of each operation, by name."""

from pallas_kernels.recurrent.choice import Implementation
from pallas_kernels.recurrent.conv_delta import in_turn
from pallas_kernels.recurrent.cpu.operations import (
    gated_delta_rule_numba,
    refuses_beside_convolution,
    refuses_columns,
    refuses_heads,
    selective_scan_numba,
    ssd_numba,
)
from pallas_kernels.recurrent.gpu.decode import gated_delta_rule_gpu, selective_scan_gpu, ssd_gpu
from pallas_kernels.recurrent.gpu.support import refuses_lines
from pallas_kernels.recurrent.inputs import scaled_first
from pallas_kernels.recurrent.reference import (
    causal_conv1d_reference,
    gated_delta_rule_reference,
    selective_scan_reference,
    ssd_reference,
)
from pallas_kernels.recurrent.tpu.conv import causal_conv1d_tpu
from pallas_kernels.recurrent.tpu.conv_delta import conv_delta_rule_tpu
from pallas_kernels.recurrent.tpu.matrices import gated_delta_rule_tpu, ssd_tpu
from pallas_kernels.recurrent.tpu.selective import selective_scan_tpu
from pallas_kernels.recurrent.tpu.support import (
    refuses_conv_delta,
    refuses_delta,
    refuses_matrices,
    refuses_rows,
    refuses_selective,
)
from pallas_kernels.recurrent.xla.conv import causal_conv1d_xla
from pallas_kernels.recurrent.xla.delta import gated_delta_rule_xla
from pallas_kernels.recurrent.xla.selective import selective_scan_xla
from pallas_kernels.recurrent.xla.ssd import ssd_xla

CAUSAL_CONV1D = {
    "reference": Implementation(causal_conv1d_reference),
    "xla": Implementation(causal_conv1d_xla),
    "pallas_tpu": Implementation(causal_conv1d_tpu, refuses_rows),
}
SELECTIVE_SCAN = {
    "reference": Implementation(selective_scan_reference),
    "xla": Implementation(selective_scan_xla),
    "pallas_tpu": Implementation(selective_scan_tpu, refuses_selective),
    "pallas_gpu": Implementation(selective_scan_gpu, refuses_lines),
    "numba": Implementation(selective_scan_numba, refuses_columns),
}
SSD = {
    "reference": Implementation(ssd_reference),
    "xla": Implementation(ssd_xla),
    "pallas_tpu": Implementation(ssd_tpu, refuses_matrices),
    "pallas_gpu": Implementation(ssd_gpu, refuses_lines),
    "numba": Implementation(ssd_numba, refuses_heads),
}
GATED_DELTA_RULE = {
    "reference": Implementation(scaled_first(gated_delta_rule_reference)),
    "xla": Implementation(gated_delta_rule_xla),
    "pallas_tpu": Implementation(scaled_first(gated_delta_rule_tpu), refuses_delta),
    "pallas_gpu": Implementation(scaled_first(gated_delta_rule_gpu), refuses_lines),
    "numba": Implementation(gated_delta_rule_numba, refuses_heads),
}
CONV_DELTA_RULE = {
    "reference": Implementation(in_turn(causal_conv1d_reference, GATED_DELTA_RULE["reference"].run)),
    "xla": Implementation(in_turn(causal_conv1d_xla, gated_delta_rule_xla)),
    "pallas_tpu": Implementation(conv_delta_rule_tpu, refuses_conv_delta),
    "pallas_gpu": Implementation(
        in_turn(causal_conv1d_xla, GATED_DELTA_RULE["pallas_gpu"].run),
        lambda place, key_heads: refuses_lines(place.state, key_heads),
    ),
    "numba": Implementation(in_turn(causal_conv1d_xla, gated_delta_rule_numba), refuses_beside_convolution),
}
