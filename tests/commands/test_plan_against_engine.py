"""Plans are checked against reality: what an engine allocates, and that it runs under either policy."""

from pathlib import Path

import pytest

from jaxkv import LLM, SamplingParams
from jaxkv.planning import PlanConfig, make_plan
from tests.engine.serving import load_script

PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    load_script("make_tiny_checkpoint").write_checkpoint("gemma3", path, num_layers=4)
    return path


@pytest.fixture(scope="module")
def engines(folder: Path) -> dict[str, LLM]:
    return {
        policy: LLM(
            str(folder),
            policy=policy,
            memory="1MiB",
            max_model_len=64,
            max_num_seqs=1,
            max_num_batched_tokens=32,
            prefill_buckets=(32,),
            dtype="float32",
        )
        for policy in ("split", "unified")
    }


@pytest.mark.parametrize("policy", ["split", "unified"])
def test_the_engine_holds_exactly_the_plans_bytes(engines: dict[str, LLM], policy: str) -> None:
    llm = engines[policy]
    config = PlanConfig(
        policy=policy, max_model_len=64, max_num_batched_tokens=32, max_num_seqs=1, batches_in_flight=1
    )
    planned = make_plan(llm.loaded.cache_specs(16), config, 2**20)
    assert llm.plan.groups == planned.groups
    assert llm.engine.runner.pages.nbytes == llm.plan.pool_bytes == planned.pool_bytes


def test_both_policies_give_the_same_tokens(engines: dict[str, LLM]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    answers = [llm.generate([PROMPT], params)[0].token_ids for llm in engines.values()]
    assert len(answers[0]) == 24
    assert answers[0] == answers[1]
