"""Which GPU a function is being traced for."""

import jax

from pallas_kernels.aot_gpu import GPU_CHIPS


def compute_capability() -> float | None:
    """That of the GPU that the mesh in use describes, else of this process's first GPU, else None.

    0 for a GPU that has none, not being NVIDIA's.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        for chip in GPU_CHIPS.values():
            if described.device_kind == chip.name:
                return float(chip.capability)
    if jax.default_backend() != "gpu":
        return None
    said = jax.local_devices()[0].compute_capability
    return float(said) if said.replace(".", "").isdigit() else 0.0
