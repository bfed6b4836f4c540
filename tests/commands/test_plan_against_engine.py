"""Plans are checked against reality: what an engine allocates, and that it runs under either policy."""

import inspect
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxkv import LLM, JaxkvError, SamplingParams
from jaxkv.cli import main
from jaxkv.engine.cache_layout import cache_layout
from jaxkv.kv_cache_dtype import KV_CACHE_DTYPES
from jaxkv.planning import PlanConfig, make_plan
from jaxkv.planning.study_table import ENGINE_DEFAULTS
from jaxkv.specs import KVCacheSpec, MambaSpec
from pallas_kernels import AttentionPageLayout
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


FAMILIES = {"gemma3": 6, "jamba": 3, "lara-mini": 3, "lfm3": 3, "qwen3-next": 4}
"""Layers of each family's model: enough that it has all kinds."""


def write_tiny(family: str, folder: Path, **keys: str) -> Path:
    """A tiny model whose config.json has `keys`, too."""
    load_script("make_tiny_checkpoint").write_checkpoint(family, folder, num_layers=FAMILIES[family])
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | keys))
    return folder


class Both(NamedTuple):
    """An engine, and the report of `jaxkv plan` for the same settings."""

    llm: LLM
    planned: dict[str, Any]


def allocated_and_planned(folder: Path, capsys: pytest.CaptureFixture[str], **settings: Any) -> Both:
    """With small sizes; `settings` are called alike on both sides."""
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 32}
    llm = LLM(str(folder), memory="2MiB", warm_up=False, **sizes, **settings)
    words = {"memory": "2MiB"} | sizes | settings
    options = [word for name, value in words.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["plan", str(folder), "--json", *options]) == 0
    return Both(llm, json.loads(capsys.readouterr().out))


def state_dtypes(llm: LLM) -> set[str]:
    """The dtypes of the states that accumulate."""
    specs = [group.spec for group in llm.plan.groups]
    return {dtype for spec in specs if isinstance(spec, MambaSpec) for dtype in spec.dtypes[1:]}


@pytest.mark.parametrize("policy", ["split", "unified"])
@pytest.mark.parametrize("dtypes", [("bfloat16", "auto"), ("bfloat16", "float32"), ("float32", "auto")])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_command_plans_what_the_engine_allocates(
    family: str, dtypes: tuple[str, str], policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny(family, tmp_path / "model")
    dtype, state_dtype = dtypes
    llm, planned = allocated_and_planned(folder, capsys, dtype=dtype, state_dtype=state_dtype, policy=policy)
    assert llm.engine.runner.pages.nbytes == planned["pool_bytes"]
    assert [
        (list(group.layer_names), group.block_size, group.spec.page_size_bytes, group.blocks_per_state)
        for group in llm.plan.groups
    ] == [
        (group["layer_names"], group["block_size"], group["page_size_bytes"], group["blocks_per_state"])
        for group in planned["groups"]
    ]


@pytest.mark.parametrize("policy", ["split", "unified"])
@pytest.mark.parametrize(("family", "kept"), [("gemma3", "fp8"), ("gemma3", "bfloat16"), ("jamba", "int8")])
def test_the_command_plans_keys_and_values_as_the_engine_keeps_them(
    family: str, kept: str, policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recurrent states keep their dtypes; pages hold what the layout needs and no more than the plan says."""
    folder = write_tiny(family, tmp_path / "model")
    llm, planned = allocated_and_planned(folder, capsys, dtype="float32", kv_cache_dtype=kept, policy=policy)
    assert llm.engine.runner.pages.nbytes == planned["pool_bytes"]
    assert [group.spec.page_size_bytes for group in llm.plan.groups] == [
        group["page_size_bytes"] for group in planned["groups"]
    ]
    assert state_dtypes(llm) <= {"float32"}
    layout = cache_layout(llm.plan)
    for name, spec in specs_by_layer(llm).items():
        page = layout.place(name).layout
        if isinstance(page, AttentionPageLayout):
            assert page.used_words * 4 == spec.unpadded_page_size_bytes
            assert page.dtype == KV_CACHE_DTYPES[kept]


def specs_by_layer(llm: LLM) -> dict[str, KVCacheSpec]:
    """What each layer keeps, as planned."""
    return {
        name: group.spec_of(index)
        for group in llm.plan.groups
        for index, name in enumerate(group.layer_names)
    }


def test_a_config_names_the_dtype_of_states(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_tiny("jamba", tmp_path / "stated", dtype="bfloat16", mamba_ssm_cache_dtype="float32")
    assert state_dtypes(LLM(str(folder), memory="2MiB", max_model_len=64, warm_up=False)) == {"float32"}
    assert "recurrent states are kept in bfloat16" not in caplog.text
    asked = LLM(str(folder), memory="2MiB", max_model_len=64, state_dtype="bfloat16", warm_up=False)
    assert state_dtypes(asked) == {"bfloat16"}
    assert "recurrent states are kept in bfloat16" in caplog.text


def test_a_dtype_in_which_no_state_is_kept_is_refused(folder: Path) -> None:
    with pytest.raises(JaxkvError, match="state_dtype must be auto, bfloat16 or float32, not 'float16'"):
        LLM(str(folder), memory="1MiB", state_dtype="float16", warm_up=False)


def test_both_policies_give_the_same_tokens(engines: dict[str, LLM]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    answers = [llm.generate([PROMPT], params)[0].token_ids for llm in engines.values()]
    assert len(answers[0]) == 24
    assert answers[0] == answers[1]


def test_the_plan_says_what_it_assumes_and_what_an_engine_takes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = inspect.signature(LLM).parameters
    assert {name: parameters[name].default for name in ENGINE_DEFAULTS} == ENGINE_DEFAULTS
    assert main(["plan", str(folder), "--max-num-seqs", "2", "--max-num-batched-tokens", "32"]) == 0
    assumed = "max_num_seqs 2, max_num_batched_tokens 32; an LLM plans with 8, 1,024 unless told otherwise"
    assert assumed in capsys.readouterr().out
