"""From the options of `jaxkv plan` to a study: model, machine, memory."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv.dtypes import itemsize
from jaxkv.errors import JaxkvError
from jaxkv.kv_cache_dtype import choose_kv_cache_dtype
from jaxkv.memory_size import parse_memory_size
from jaxkv.model_config import ModelCache, read_model_cache
from jaxkv.model_config.layer_list import read_layer_list
from jaxkv.model_config.model_cache import DTYPE_NAMES, cache_dtype_named, state_dtype_named
from jaxkv.model_config.parameters import count_parameters
from jaxkv.planning.machine import Machine, MemoryBudget, activation_reserve, make_machine, memory_budget
from jaxkv.planning.plan import PlanConfig
from jaxkv.planning.study import PlanStudy, make_study
from jaxkv.specs import KVCacheSpec

FALLBACK_MAX_MODEL_LEN = 8192
"""Tokens, for a config that does not say how long the model's sequences may be."""

DEFAULT_MEMORY = "1GiB"
"""Of the cache, where neither --memory nor an accelerator says."""


class PlanInputs(NamedTuple):
    """What a plan is made from; see PlanStudy. cache: None where the layers were listed one by one."""

    name: str
    specs: dict[str, KVCacheSpec]
    config: PlanConfig
    machine: Machine
    memory: int
    budget: MemoryBudget | None
    about: dict[str, Any]
    warnings: tuple[str, ...]
    cache: ModelCache | None


def study_of(args: argparse.Namespace, model: str | None) -> PlanStudy:
    """Reads `model` (None: the list of layers in `args.layers`) and plans it.
    Raises JaxkvError for bad input.
    """
    inputs = inputs_of(args, model)
    return make_study(
        inputs.name,
        inputs.specs,
        inputs.config,
        inputs.machine,
        inputs.memory,
        budget=inputs.budget,
        about=inputs.about,
        warnings=inputs.warnings,
    )


def inputs_of(args: argparse.Namespace, model: str | None) -> PlanInputs:
    """Reads `model` (None: the list of layers in `args.layers`). Raises JaxkvError for bad input."""
    _check_unused(args)
    machine = make_machine(
        args.accelerator,
        chips=args.chips,
        tensor_parallel=args.tensor_parallel,
        data_parallel=args.data_parallel,
    )
    if model is None:
        listed = read_layer_list(args.layers, args.block_size)
        config = _plan_config(args, machine, listed.max_model_len)
        budget = None if args.memory is not None else _budget(args, machine, None)
        memory = _memory(args, budget)
        about = {"num_layers": len(listed.specs), "cache_dtype": "the list's own"}
        return PlanInputs(
            Path(args.layers).stem, listed.specs, config, machine, memory, budget, about, (), None
        )
    cache = read_model_cache(model)
    specs = cache.specs(
        args.block_size,
        args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        state_dtype=args.state_dtype,
        tensor_parallel=machine.tensor_parallel,
    )
    config = _plan_config(args, machine, cache.max_model_len)
    budget = None if args.memory is not None else _budget(args, machine, cache)
    return PlanInputs(
        cache.name,
        specs,
        config,
        machine,
        _memory(args, budget),
        budget,
        _about(args, cache),
        (*cache.replication(machine.tensor_parallel), *_beyond_maximum(args, cache.max_model_len)),
        cache,
    )


def _check_unused(args: argparse.Namespace) -> None:
    """Options that this model or machine has no use for must make sense all the same."""
    for dtype, named in (
        (args.dtype, cache_dtype_named),
        (args.state_dtype, state_dtype_named),
        (args.weight_dtype, _weight_dtype_named),
    ):
        if dtype != "auto":
            named(dtype)
    choose_kv_cache_dtype(args.kv_cache_dtype, args.dtype)
    for size in (args.memory, args.weights):
        if size is not None:
            parse_memory_size(size)


def _weight_dtype_named(name: str) -> str:
    full = DTYPE_NAMES.get(name, name)
    itemsize(full)
    return full


def _about(args: argparse.Namespace, cache: ModelCache) -> dict[str, Any]:
    dtype = cache.cache_dtype(args.dtype)
    about: dict[str, Any] = {
        "num_layers": len(cache.layers),
        "dtype": dtype,
        "cache_dtype": choose_kv_cache_dtype(args.kv_cache_dtype, dtype),
    }
    try:
        about["parameters"] = count_parameters(cache).total
        about["weight_dtype"] = _weight_dtype(args, cache)
    except JaxkvError as error:
        about["parameters"] = None
        about["parameters_unknown"] = str(error)
    return about


def _weight_dtype(args: argparse.Namespace, cache: ModelCache) -> str:
    asked: str = args.weight_dtype
    return cache.model_dtype if asked == "auto" else _weight_dtype_named(asked)


def _plan_config(args: argparse.Namespace, machine: Machine, model_max_len: int | None) -> PlanConfig:
    """The options as a plan's configuration. The model's own maximum length may be lowered to fit."""
    own_maximum = model_max_len or FALLBACK_MAX_MODEL_LEN
    alignment = machine.accelerator.tile_bytes if args.page_alignment is None else args.page_alignment
    return PlanConfig(
        policy=args.policy,
        max_model_len=own_maximum if args.max_model_len is None else args.max_model_len,
        auto_fit_max_model_len=args.max_model_len is None,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        page_alignment_bytes=alignment,
        max_block_growth=args.max_block_growth,
        disable_hybrid_kv_cache_manager=args.disable_hybrid_kv_cache_manager,
        align_hybrid_blocks=True,
    )


def _beyond_maximum(args: argparse.Namespace, model_max_len: int | None) -> tuple[str, ...]:
    """A warning where requests may be longer than the model was made for, which no engine would run."""
    if model_max_len is None or args.max_model_len is None or args.max_model_len <= model_max_len:
        return ()
    return (
        f"max_model_len {args.max_model_len:,} is more than the {model_max_len:,} tokens that the model was "
        "made for",
    )


def _memory(args: argparse.Namespace, budget: MemoryBudget | None) -> int:
    if budget is not None:
        return budget.cache_bytes
    return parse_memory_size(DEFAULT_MEMORY if args.memory is None else args.memory)


def _budget(args: argparse.Namespace, machine: Machine, cache: ModelCache | None) -> MemoryBudget | None:
    """How a chip's memory is divided; None where the accelerator is the host."""
    if machine.accelerator.memory is None:
        return None
    return memory_budget(machine, _weight_bytes(args, cache), _activations(args, machine, cache))


def _weight_bytes(args: argparse.Namespace, cache: ModelCache | None) -> int:
    if args.weights is not None:
        return parse_memory_size(args.weights)
    if cache is None:
        raise JaxkvError("a list of layers says nothing of the weights: give --memory or --weights")
    try:
        return count_parameters(cache).total * itemsize(_weight_dtype(args, cache))
    except JaxkvError as error:
        raise JaxkvError(
            f"the weights' size is unknown ({error}): give --weights SIZE or --memory SIZE"
        ) from None


def _activations(args: argparse.Namespace, machine: Machine, cache: ModelCache | None) -> int:
    """The reserve for a step. Sizes that the config lacks are taken as those of a large model."""
    text = cache.text if cache is not None else None

    def size(default: int, *keys: str) -> int:
        return (text.optional_integer(*keys) if text is not None else None) or default

    hidden = size(8192, "hidden_size")
    return activation_reserve(
        hidden_size=hidden,
        widest=size(4 * hidden, "intermediate_size", "moe_intermediate_size"),
        vocab_size=size(262144, "vocab_size"),
        num_tokens=args.max_num_batched_tokens,
        num_seqs=args.max_num_seqs,
        tensor_parallel=machine.tensor_parallel,
    )
