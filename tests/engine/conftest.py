"""A tiny random Gemma, compiled once; every test makes its own cache and scheduler over it."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxkv.engine.buckets import make_buckets
from jaxkv.engine.loading import LoadedModel, load_model
from jaxkv.engine.poison import NAN_WORD, PoisoningRunner
from tests.engine.serving import (
    MAX_NUM_SEQS,
    MAX_TOKENS_A_STEP,
    NUM_BLOCKS,
    Bench,
    load_script,
    tiny_plan,
)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A Hugging Face folder: three layers, every third full, windows of 8, float32, a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    load_script("make_tiny_checkpoint").write_checkpoint("gemma3", folder, num_layers=3)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder) -> LoadedModel:
    return load_model(tiny_folder, "float32")


@pytest.fixture(scope="session")
def bench(tiny) -> Bench:
    plan = tiny_plan(tiny, NUM_BLOCKS, batches_in_flight=2)
    buckets = make_buckets(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_TOKENS_A_STEP,
        decode_seqs=(1,),
        prefill_tokens=(8,),
    )
    runner = PoisoningRunner(
        tiny.model,
        plan,
        buckets=buckets,
        max_num_seqs=MAX_NUM_SEQS,
    )
    runner.compile()
    runner.pages = jnp.full_like(runner.pages, NAN_WORD)
    return Bench(tiny, runner, buckets)
