"""Serving tiny models with recurrent layers in tests: one compiled runner a family."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxkv.engine.buckets import make_buckets
from jaxkv.engine.loading import LoadedModel, load_model
from jaxkv.engine.poison import NAN_WORD, PoisoningRunner
from jaxkv.planning import PlanConfig, make_plan
from tests.engine.serving import Bench, load_script

FAMILIES = {"jamba": 3, "lara-mini": 3, "lfm3": 3, "qwen3-next": 2}
"""Layers of each family's model: the fewest that have all its kinds."""

BLOCK_SIZE = 16
NUM_BLOCKS = 600
MAX_NUM_SEQS = 4
MAX_TOKENS_A_STEP = 64
MAX_MODEL_LEN = 1100


def tiny_model(family: str, folder: Path) -> LoadedModel:
    """A model that is written to `folder`."""
    load_script("make_tiny_checkpoint").write_checkpoint(family, folder, num_layers=FAMILIES[family])
    return load_model(folder, "float32")


def make_bench(loaded: LoadedModel, **choices: Any) -> Bench:
    """A runner whose steps can leave a state inside a chunk. choices: further ones of the plan."""
    config = PlanConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_TOKENS_A_STEP,
        max_num_seqs=MAX_NUM_SEQS,
        batches_in_flight=2,
        num_gpu_blocks_override=NUM_BLOCKS,
        **choices,
    )
    plan = make_plan(loaded.cache_specs(BLOCK_SIZE, num_prefill_checkpoints=1), config, 2**30)
    buckets = make_buckets(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_TOKENS_A_STEP,
        decode_seqs=(MAX_NUM_SEQS,),
        prefill_tokens=(MAX_TOKENS_A_STEP,),
    )
    runner = PoisoningRunner(loaded.model, plan, buckets=buckets, max_num_seqs=MAX_NUM_SEQS)
    runner.compile()
    runner.pages = jnp.full_like(runner.pages, NAN_WORD)
    return Bench(loaded, runner, buckets)
