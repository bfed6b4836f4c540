"""From the options of `jaxkv replay` to the replays that they ask for."""

import argparse
import math
from itertools import product
from typing import Any

from jaxkv.commands.plan_inputs import inputs_of
from jaxkv.errors import JaxkvError
from jaxkv.lab.flops import model_cost
from jaxkv.lab.job import Job
from jaxkv.lab.settings import ReplaySettings
from jaxkv.lab.trace import Trace

SWEEPABLE = (
    "memory", "blocks", "fits", "accelerator", "policy", "retention", "eviction", "clock", "block-size"
)  # fmt: skip
GENERATED_BLOCK = 16


def combinations(args: argparse.Namespace) -> list[tuple[argparse.Namespace, str]]:
    """Every combination of the values of --sweep, and its name. Raises JaxkvError for a bad --sweep."""
    names: list[str] = []
    values: list[list[str]] = []
    for part in args.sweep.split(","):
        name, _, listed = part.partition("=")
        if name not in SWEEPABLE or not all(listed.split(":")):
            raise JaxkvError(
                f"--sweep {part!r} is not NAME=VALUE:VALUE with a name of {', '.join(SWEEPABLE)}"
            )
        if name in names:
            raise JaxkvError(f"--sweep names {name} twice")
        names.append(name)
        values.append(listed.split(":"))
    combined = []
    for chosen in product(*values):
        changed = argparse.Namespace(**vars(args))
        for name, value in zip(names, chosen, strict=True):
            setattr(changed, name.replace("-", "_"), _typed(name, value))
        combined.append((changed, ", ".join(f"{n} {v}" for n, v in zip(names, chosen, strict=True))))
    return combined


def _typed(name: str, value: str) -> str | int | float:
    try:
        if name in ("blocks", "block-size"):
            return int(value)
        return float(value) if name == "fits" else value
    except ValueError:
        raise JaxkvError(f"--sweep {name}={value}: {value!r} is not a number") from None


def job_of(args: argparse.Namespace, trace: Trace, sweep: str | None) -> Job:
    """The replay that the options ask for, `sweep` its name in a sweep. Raises JaxkvError for bad options,
    NoMemoryError where the machine that they name is too small.
    """
    given = [name for name in ("blocks", "fits", "memory") if getattr(args, name) is not None]
    given += ["infinite"] if args.infinite else []
    if len(given) > 1:
        raise JaxkvError(f"give one of --{', --'.join(given)}")
    if args.blocks is not None and args.blocks < 1:
        raise JaxkvError(f"--blocks must be at least 1, got {args.blocks}")
    if args.fits is not None and not 0 < args.fits < math.inf:
        raise JaxkvError(f"--fits must be more than 0 and finite, got {args.fits}")
    if (args.model is None) == (args.layers is None):
        raise JaxkvError("give either --model MODEL or --layers FILE")
    about = asked_of(args, sweep)
    args = argparse.Namespace(**vars(args))
    if args.block_size is None:
        args.block_size = trace.block_size or GENERATED_BLOCK
    inputs = inputs_of(args, args.model)
    settings = ReplaySettings(
        clock=args.clock,
        step_seconds=args.step_seconds,
        retention_interval=_retention(args.retention),
        eviction=args.eviction,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    return Job(
        model=inputs.name,
        specs=inputs.specs,
        config=inputs.config,
        memory=inputs.memory,
        settings=settings,
        cost=model_cost(inputs.cache) if inputs.cache is not None else None,
        num_blocks=args.blocks,
        fits=args.fits,
        keep_everything=args.infinite,
        about=about,
    )


def asked_of(args: argparse.Namespace, sweep: str | None) -> dict[str, Any]:
    """The options that decide a replay, for its report, and the name of its combination in a sweep."""
    asked = {name: value for name, value in vars(args).items() if name not in _NOT_ASKED}
    return {**asked, "sweep": sweep}


_NOT_ASKED = ("command", "json", "html", "verify", "engine", "sweep", "jobs")


def _retention(text: str) -> int | None:
    if text in ("sparse", "dense"):
        return 0 if text == "sparse" else None
    if text.isdecimal():
        return int(text)
    raise JaxkvError(f"--retention must be sparse, dense or a number of tokens, got {text!r}")
