"""How parameters are put together from the tensors of a checkpoint, and what is refused."""

from collections.abc import Collection

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.checkpoint import NameMap, Source, build_model

EXPERTS, INNER, HIDDEN, KERNEL = 3, 2, 4, 5
NAMES: NameMap = {
    "norm": Source(("norm.weight",), plus=1.0),
    "layers.{i}.gate_up": Source(("l.{i}.experts.{e}.gate", "l.{i}.experts.{e}.up")),
    "layers.{i}.conv": Source(("l.{i}.conv.weight",), unit_axis=1),
}


class Layer(nnx.Module):
    def __init__(self):
        self.gate_up = nnx.Param(jnp.zeros((EXPERTS, 2 * INNER, HIDDEN), jnp.bfloat16))
        self.conv = nnx.Param(jnp.zeros((HIDDEN, KERNEL), jnp.float32))


class Model(nnx.Module):
    def __init__(self):
        self.norm = nnx.Param(jnp.zeros((HIDDEN,), jnp.float32))
        self.layers = nnx.List([Layer() for _ in range(2)])


class Memory:
    """Tensors held in a dictionary."""

    def __init__(self, tensors: dict[str, np.ndarray]):
        self.tensors = tensors

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.tensors[name].shape if name in self.tensors else None

    def read(self, name: str) -> np.ndarray:
        return self.tensors[name]


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (HIDDEN,)}
    for i in range(2):
        shapes[f"l.{i}.conv.weight"] = (HIDDEN, 1, KERNEL)
        for e in range(EXPERTS):
            shapes |= {f"l.{i}.experts.{e}.{part}": (INNER, HIDDEN) for part in ("gate", "up")}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def test_experts_get_an_axis_of_their_own_and_unit_axes_go(tensors):
    model = build_model(Model, NAMES, Memory(tensors))
    gate_up = np.asarray(model.layers[1].gate_up[...])
    for e in range(EXPERTS):
        expected = np.concatenate([tensors[f"l.1.experts.{e}.gate"], tensors[f"l.1.experts.{e}.up"]])
        assert np.array_equal(gate_up[e], expected.astype(jnp.bfloat16))
    assert np.array_equal(model.layers[0].conv[...], tensors["l.0.conv.weight"][:, 0])
    assert np.array_equal(model.norm[...], tensors["norm.weight"] + 1)


def test_a_missing_expert_is_named(tensors):
    del tensors["l.1.experts.2.up"]
    with pytest.raises(ValueError, match=r"lack the tensor l\.1\.experts\.2\.up"):
        build_model(Model, NAMES, Memory(tensors))


def test_an_expert_of_another_shape_is_named_with_both(tensors):
    tensors["l.0.experts.1.gate"] = np.zeros((INNER + 1, HIDDEN), np.float32)
    with pytest.raises(
        ValueError, match=r"l\.0\.experts\.1\.gate is \(3, 4\).* \(4, 4\) in layers\.0\.gate_up"
    ):
        build_model(Model, NAMES, Memory(tensors))


@pytest.mark.parametrize("name", ["l.0.experts.3.gate", "l.2.conv.weight", "l.1.conv.bias"])
def test_a_layer_tensor_without_a_place_is_refused(tensors, name):
    tensors |= {name: np.zeros(1, np.float32), "vision.weight": np.zeros(1, np.float32)}
    with pytest.raises(ValueError, match=f"1 tensors that the configuration has no place for.* {name}"):
        build_model(Model, NAMES, Memory(tensors))


def test_tensors_outside_the_layers_may_stay_unread(tensors):
    build_model(Model, NAMES, Memory(tensors | {"vision.weight": np.zeros(1, np.float32)}))
