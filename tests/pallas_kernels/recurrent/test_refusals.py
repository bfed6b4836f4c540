"""Choosing an implementation, and refusing shapes that disagree."""

import logging

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.recurrent import StateLayout, choice, selective_scan
from pallas_kernels.recurrent.operations import CAUSAL_CONV1D, GATED_DELTA_RULE, SELECTIVE_SCAN, SSD
from pallas_kernels.recurrent.state_place import StatePlace
from tests.pallas_kernels.recurrent.recurrences import convolution, convolved_delta, delta, mamba1, mamba2
from tests.pallas_kernels.recurrent.steps import Sequence, make_step

OPERATIONS = {
    "conv": convolution(24),
    "mamba1": mamba1(24, 4),
    "mamba2": mamba2(4, 8, 16, 2),
    "delta": delta(2, 4, 16, 8),
    "conv and delta": convolved_delta(1, 2, 8),
}


def place_of(shape: tuple[int, ...], dtype: str = "float32") -> StatePlace:
    layout = StateLayout(shapes=(shape,), dtypes=(dtype,), page_rows=8)
    return StatePlace(layout=layout, part=0, layer_slot=0, layer_slots=1)


@pytest.mark.parametrize(
    ("known", "place", "key_heads", "reason"),
    [
        (CAUSAL_CONV1D, place_of((100, 3)), 0, "not whole rows of 128"),
        (SELECTIVE_SCAN, place_of((1000, 16)), 0, "1000 channels are not a multiple of 1024"),
        (SELECTIVE_SCAN, place_of((1024, 3), "bfloat16"), 0, "3 in bfloat16 is not even"),
        (SSD, place_of((4, 48, 128)), 1, "48 channels a head do not fill 128 lanes"),
        (SSD, place_of((4, 64, 12)), 1, "key size of 12 is not a multiple of 8"),
        (SSD, place_of((4, 64, 16)), 4, "4 key heads do not divide 2 blocks"),
        (SSD, place_of((2, 64, 16), "bfloat16"), 1, "1 blocks of bfloat16 are not an even number"),
        (GATED_DELTA_RULE, place_of((4, 64, 64)), 4, "values of 64 are not 128"),
    ],
)
def test_a_state_that_pallas_does_not_serve(known, place, key_heads, reason, monkeypatch, caplog):
    with pytest.raises(ValueError, match=reason):
        choice.choose(known, place, "pallas_tpu", key_heads)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr("pallas_kernels.choice._already_said", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert choice.choose(known, place, None, key_heads) is known["xla"].run
    assert len(caplog.messages) == 1
    assert reason in caplog.messages[0]


def test_a_platform_takes_its_own_form(monkeypatch):
    place = place_of((1024, 16))
    assert choice.choose(SELECTIVE_SCAN, place, None) is SELECTIVE_SCAN["numba"].run
    assert choice.choose(CAUSAL_CONV1D, place, None) is CAUSAL_CONV1D["xla"].run
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert choice.choose(SELECTIVE_SCAN, place, None) is SELECTIVE_SCAN["pallas_tpu"].run
    with pytest.raises(ValueError, match="unknown implementation 'cuda', known: reference, xla, pallas_tpu"):
        choice.choose(SELECTIVE_SCAN, place, "cuda")


@pytest.mark.parametrize("name", OPERATIONS)
def test_inputs_of_another_size_are_refused(name):
    step = make_step(OPERATIONS[name], [Sequence(before=0, new=3)])
    weights, place = step.operation.weights, step.place
    for changed in step.tokens:
        shorter = step.tokens | {changed: step.tokens[changed][:2]}
        with pytest.raises(ValueError, match="must be"):
            step.operation.run(shorter, weights, jnp.asarray(step.pages), step.batch, step.table, **place)
    floats, words = jnp.zeros(step.pages.shape), jnp.asarray(step.pages)
    with pytest.raises(ValueError, match=r"pages must be uint32\[num_pages, 8, 128\], got float32"):
        step.operation.run(step.tokens, weights, floats, step.batch, step.table, **place)
    other = place | ({"part": 0} if "part" in place else {"parts": (0, 2)})
    with pytest.raises(ValueError, match=r"part 0 of the state must be .* the layout has \[6, 3\]"):
        step.operation.run(step.tokens, weights, words, step.batch, step.table, **other)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_step_of_no_tokens_is_refused(name):
    step = make_step(OPERATIONS[name], [Sequence(before=2, new=0)])
    with pytest.raises(ValueError, match=r"at least one token and one row.* has 0 and 1"):
        step.operation.run(
            step.tokens, step.operation.weights, jnp.asarray(step.pages), step.batch, step.table, **step.place
        )


def test_channels_that_are_not_whole_heads_are_refused():
    step = make_step(convolved_delta(1, 2, 8), [Sequence(before=0, new=3)])
    layout = StateLayout(shapes=((40, 3), (2, 8, 8)), dtypes=("float32", "float32"), page_rows=8)
    place = step.place | {"layout": layout, "parts": (0, 1)}
    tokens = step.tokens | {"x": step.tokens["x"].repeat(2, axis=1)[:, :40]}
    weights = {"weight": jnp.ones((40, 4)), "bias": None}
    with pytest.raises(ValueError, match="40 channels are not 2 values of 8 with queries and keys of 8"):
        step.operation.run(tokens, weights, jnp.asarray(step.pages), step.batch, step.table, **place)


def test_lengths_do_not_compile_again():
    """Shapes of arrays are the only key: the same bucket serves any lengths, decodes and chunks."""
    operation = mamba1(24, 4)
    many = [Sequence(before=1, new=1), Sequence(before=0, new=9), Sequence(before=4, new=30)]
    steps = [make_step(operation, many), make_step(operation, many[::2], spare_tokens=9, spare_rows=1)]
    compilations = 0

    @jax.jit
    def run(tokens, pages, batch, table):
        nonlocal compilations
        compilations += 1
        x, dt, b, c = (tokens[name] for name in ("x", "dt", "b", "c"))
        a, d = operation.weights["a"], operation.weights["d"]
        return selective_scan(x, dt, a, b, c, d, pages, batch, table, **steps[0].place)

    pages = jnp.asarray(steps[0].pages)
    for step in steps:
        run(step.tokens, pages, step.batch, step.table)
    assert compilations == 1
