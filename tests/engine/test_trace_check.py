"""The laboratory's replays decide what the engine does with a real model."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxkv.engine.llm import LLM
from jaxkv.engine.trace_check import check_trace
from jaxkv.errors import JaxkvError
from jaxkv.lab.content import Tokens
from jaxkv.lab.generator import generate
from jaxkv.lab.loading import load_trace
from jaxkv.lab.trace import Trace
from tests.engine.serving import load_script

LAB_DATA = Path(__file__).parents[1] / "lab" / "data"


def llm_of(folder: Path, memory: int) -> LLM:
    return LLM(
        folder,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        memory=memory,
        block_size=4,
        decode_buckets=(4,),
        prefill_buckets=(64,),
    )


def short(trace: Trace) -> Trace:
    """The trace's patterns with prompts of at most 200 tokens and short answers."""
    requests = [
        dataclasses.replace(
            request,
            num_prompt_tokens=min(200, len(request.content.prompt)),
            num_output_tokens=3 + index % 8,
            content=Tokens(request.content.prompt[:200], np.zeros(0, np.int32)),
        )
        for index, request in enumerate(trace.requests)
        if isinstance(request.content, Tokens)
    ]
    return dataclasses.replace(trace, requests=requests)


@pytest.mark.parametrize(
    ("model", "layers", "clock"),
    [("gemma3", 3, "sequential"), ("lara-mini", 3, "as-fast-as-possible")],
)
def test_counters_of_engine_and_replay_are_equal(model: str, layers: int, clock: str, tmp_path: Path) -> None:
    load_script("make_tiny_checkpoint").write_checkpoint(model, tmp_path / model, num_layers=layers)
    trace = short(generate("mixed", 14, seed=1))
    checked = check_trace(llm_of(tmp_path / model, 2 * 2**20), trace, clock)
    assert not checked.differing, checked
    assert checked.engine["prefix_cache_hits"] > 0


def test_traces_that_a_model_cannot_read_are_refused(tiny_folder: Path) -> None:
    llm = llm_of(tiny_folder, 2 * 2**20)
    with pytest.raises(JaxkvError, match="whose tokens are known"):
        check_trace(llm, load_trace(str(LAB_DATA / "mooncake_head.jsonl")), "sequential")
    with pytest.raises(JaxkvError, match="the engine has no clock of its own"):
        check_trace(llm, short(generate("chat", 2, seed=0)), "trace")
