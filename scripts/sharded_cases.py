"""More shapes for `check_kernels.py`: models under 1, 4 and 8 tensor-parallel devices, very long steps."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from kernel_cases import POOL_BYTES, Built, Case

from pallas_kernels import GroupTable, RaggedBatch, write_and_attend
from pallas_kernels.outputs import AttentionResult

_MODELS = {  # whole models; KV heads are repeated where there are fewer than devices
    "gemma3-27b": Case(kernel="attention", block_size=128, kv_heads=16, head_size=128, q_heads=32),
    "gpt-oss-120b": Case(
        kernel="attention", block_size=128, kv_heads=8, head_size=64, q_heads=64, sinks=True
    ),
    "llama4-scout": Case(
        kernel="attention", block_size=128, kv_heads=8, head_size=128, q_heads=40, context=12_288, chunk=8192
    ),
    "jamba-1.5-mini": Case(kernel="attention", block_size=16, kv_heads=8, head_size=128, q_heads=32),
    "qwen3-next-80b": Case(kernel="attention", block_size=128, kv_heads=2, head_size=256, q_heads=16),
}
_DEVICES = (1, 4, 8)
_ELSEWHERE = ("gemma3-27b/4", "gpt-oss-120b/4", "llama4-scout/4")


def under(case: Case, devices: int) -> Case:
    """One device's share of a whole model's heads."""
    return replace(case, kv_heads=max(case.kv_heads // devices, 1), q_heads=case.q_heads // devices)


_BESIDE_STATES = ("jamba-1.5-mini", "qwen3-next-80b")  # their recurrent layers have shapes of these names

SHARDED_CASES: dict[str, Case] = {}
for _model, _case in _MODELS.items():
    for _devices in _DEVICES:
        _name = _model if _devices == 1 else f"{_model}/{_devices}"
        if _name not in _ELSEWHERE:
            _share = under(_case, _devices)
            _name += " attention" if _model in _BESIDE_STATES else ""
            SHARDED_CASES[f"{_name} decode"] = _share
            SHARDED_CASES[f"{_name} prefill"] = replace(_share, sequences=1, new=2048)


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """The whole operation, writes and all, on `sequences` decodes of up to `context` tokens, and a chunk of
    `new` tokens.
    """

    case: Case
    sequences: int = 256
    context: int = 131_072
    new: int = 2048
    kernel: str = "step"
    quick: bool = False

    def build(self) -> Built:
        """Tables that name every block, which no pool has to hold."""
        case = self.case
        rows, tokens = self.sequences, self.sequences + self.new
        batch = RaggedBatch(*map(_ints, ((tokens,), (tokens,), (rows + 1,), (rows,), (), ())))
        table = GroupTable(_ints((rows, self.context // case.block_size)), _ints((rows,)))
        page_rows = case.layout.page_rows
        pages = jax.ShapeDtypeStruct((POOL_BYTES // (page_rows * 512), page_rows, 128), jnp.uint32)
        q = jax.ShapeDtypeStruct((tokens, case.q_heads, case.head_size), case.activation_dtype)
        k = jax.ShapeDtypeStruct((tokens, case.kv_heads, case.head_size), case.activation_dtype)
        place: dict[str, Any] = {"layout": case.layout, "layer_slot": 0, "layer_slots": 1}

        def attend(
            q: jax.Array, k: jax.Array, pages: jax.Array, batch: RaggedBatch, table: GroupTable
        ) -> AttentionResult:
            how = {"scale": case.head_size**-0.5, "implementation": "pallas_tpu", **place}
            return write_and_attend(q, k, k, pages, batch, table, **how)

        return Built(attend, (q, k, pages, batch, table), 2)


def _ints(shape: tuple[int, ...]) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


STEP_CASES = {
    f"{model}/4 256 x 128k": StepCase(case=under(_MODELS[model], 4))
    for model in ("gemma3-27b", "gpt-oss-120b")
}
