"""From the tensors of a checkpoint to the parameters of a model, by tables of names."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class Source(NamedTuple):
    """Where one parameter comes from.

    names: the checkpoint's tensors, stacked along their first axis. A name holds "{i}" for the layer's
    number. Where it holds "{e}" too, every expert has these tensors, and the parameter has an axis of experts
    before the others.
    plus: added in float32 (1 where a file stores norm weights w and the model keeps 1 + w).
    unit_axis: an axis of size one that the file has and the model leaves out.
    """

    names: tuple[str, ...]
    plus: float = 0.0
    unit_axis: int | None = None


# A parameter's path in the model ("layers.{i}.mlp.down") to its source.
NameMap = Mapping[str, Source]


class Tensors(Protocol):
    """The tensors of a checkpoint, whatever its format."""

    def names(self) -> Collection[str]:
        """The names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, row-major; None where there is no such tensor."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor, in float32 or the dtype they are stored in."""
        ...


class _Parameter(NamedTuple):
    """groups: the tensors of each expert, or of the one there is. stored_shape: of one group, stacked."""

    path: str
    groups: tuple[tuple[str, ...], ...]
    plus: float
    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: jnp.dtype


def build_model[M: nnx.Module](make_model: Callable[[], M], names: NameMap, tensors: Tensors) -> M:
    """The model that `make_model` describes, its parameters read from `tensors` one after the other.

    Nothing is read before every tensor is known to be there in its shape. Raises ValueError that names the
    missing tensor, both shapes, or a layer's tensor that the model has no place for.
    """
    graph, state = nnx.split(nnx.eval_shape(make_model))
    flat = nnx.to_flat_state(state)
    parameters = [_parameter(path, variable, names) for path, variable in flat]
    for parameter in parameters:
        _check(parameter, tensors)
    _refuse_unknown(parameters, names, tensors)
    values = [
        (path, variable.replace(_read(parameter, tensors)))
        for (path, variable), parameter in zip(flat, parameters, strict=True)
    ]
    return nnx.merge(graph, nnx.from_flat_state(values))


def _parameter(path: tuple, variable: nnx.Variable, names: NameMap) -> _Parameter:
    index = next((part for part in path if isinstance(part, int)), None)
    source = names[".".join("{i}" if isinstance(part, int) else part for part in path)]
    shape = variable.get_value().shape
    by_expert = any("{e}" in name for name in source.names)
    stored_shape = shape[1:] if by_expert else shape
    if (axis := source.unit_axis) is not None:
        stored_shape = (*stored_shape[:axis], 1, *stored_shape[axis:])
    return _Parameter(
        path=".".join(map(str, path)),
        groups=tuple(
            tuple(name.format(i=index, e=expert) for name in source.names)
            for expert in range(shape[0] if by_expert else 1)
        ),
        plus=source.plus,
        stored_shape=stored_shape,
        shape=shape,
        dtype=variable.get_value().dtype,
    )


def _check(parameter: _Parameter, tensors: Tensors) -> None:
    for names in parameter.groups:
        shapes = []
        for name in names:
            shape = tensors.shape(name)
            if shape is None:
                raise ValueError(f"the weights lack the tensor {name}")
            shapes.append(shape)
        total = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        if total != parameter.stored_shape or any(shape[1:] != total[1:] for shape in shapes):
            found = ", ".join(f"{name} is {shape}" for name, shape in zip(names, shapes, strict=True))
            wanted = f"{parameter.stored_shape} in {parameter.path}"
            raise ValueError(f"{found}; the configuration asks for {wanted}")


def _refuse_unknown(parameters: Sequence[_Parameter], names: NameMap, tensors: Tensors) -> None:
    """Tensors outside the layers may belong to what is not run, such as a vision tower; within them they
    change what a layer computes."""
    layers = {name.partition("{i}")[0] for source in names.values() for name in source.names if "{i}" in name}
    used = {name for parameter in parameters for group in parameter.groups for name in group}
    unknown = sorted(name for name in tensors.names() if name.startswith(tuple(layers)) and name not in used)
    if unknown:
        raise ValueError(
            f"the weights have {len(unknown)} tensors that the configuration has no place for, "
            f"the first of them {unknown[0]}"
        )


def _read(parameter: _Parameter, tensors: Tensors) -> jax.Array:
    names = [name for group in parameter.groups for name in group]
    value = tensors.read(names[0]) if len(names) == 1 else _stacked(names, parameter, tensors)
    value = jnp.asarray(value).reshape(parameter.shape)
    if parameter.plus:
        value = value.astype(jnp.float32) + parameter.plus
    return value.astype(parameter.dtype)


def _stacked(names: Sequence[str], parameter: _Parameter, tensors: Tensors) -> np.ndarray:
    """The tensors along their first axis, in the model's dtype; one at a time is held beside the result."""
    rows, *others = parameter.stored_shape
    stacked = np.empty((len(parameter.groups) * rows, *others), parameter.dtype)
    start = 0
    for name in names:
        tensor = tensors.read(name)
        stacked[start : start + len(tensor)] = tensor
        start += len(tensor)
    return stacked
