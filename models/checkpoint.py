"""From the tensors of a checkpoint to the parameters of a model, by tables of names."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class Source(NamedTuple):
    """Where one parameter comes from.

    names: the checkpoint's tensors, stacked along their first axis. A name holds "{i}" for the layer's
    number.
    plus: added in float32 (1 where a file stores norm weights w and the model keeps 1 + w).
    """

    names: tuple[str, ...]
    plus: float = 0.0


# A parameter's path in the model ("layers.{i}.mlp.down") to its source.
NameMap = Mapping[str, Source]


class Tensors(Protocol):
    """The tensors of a checkpoint, whatever its format."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, row-major; None where there is no such tensor."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor, in float32 or the dtype they are stored in."""
        ...


class _Parameter(NamedTuple):
    path: str
    names: tuple[str, ...]
    plus: float
    shape: tuple[int, ...]
    dtype: jnp.dtype


def build_model[M: nnx.Module](make_model: Callable[[], M], names: NameMap, tensors: Tensors) -> M:
    """The model that `make_model` describes, its parameters read from `tensors`.

    Nothing is read before every tensor is known to be there in its shape. Raises ValueError that names the
    missing tensor, or both shapes.
    """
    graph, state = nnx.split(nnx.eval_shape(make_model))
    flat = nnx.to_flat_state(state)
    parameters = [_parameter(path, variable, names) for path, variable in flat]
    for parameter in parameters:
        _check(parameter, tensors)
    values = [
        (path, variable.replace(_read(parameter, tensors)))
        for (path, variable), parameter in zip(flat, parameters, strict=True)
    ]
    return nnx.merge(graph, nnx.from_flat_state(values))


def _parameter(path: tuple, variable: nnx.Variable, names: NameMap) -> _Parameter:
    index = next((part for part in path if isinstance(part, int)), None)
    source = names[".".join("{i}" if isinstance(part, int) else part for part in path)]
    return _Parameter(
        path=".".join(map(str, path)),
        names=tuple(name.format(i=index) for name in source.names),
        plus=source.plus,
        shape=variable.get_value().shape,
        dtype=variable.get_value().dtype,
    )


def _check(parameter: _Parameter, tensors: Tensors) -> None:
    shapes = []
    for name in parameter.names:
        shape = tensors.shape(name)
        if shape is None:
            raise ValueError(f"the weights lack the tensor {name}")
        shapes.append(shape)
    total = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    if total != parameter.shape or any(shape[1:] != total[1:] for shape in shapes):
        found = ", ".join(f"{name} is {shape}" for name, shape in zip(parameter.names, shapes, strict=True))
        raise ValueError(f"{found}; the configuration asks for {parameter.shape} in {parameter.path}")


def _read(parameter: _Parameter, tensors: Tensors) -> jax.Array:
    arrays = [tensors.read(name) for name in parameter.names]
    value = jnp.asarray(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
    if parameter.plus:
        value = value.astype(jnp.float32) + parameter.plus
    return value.astype(parameter.dtype)
