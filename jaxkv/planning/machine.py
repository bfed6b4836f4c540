"""How much of a machine's memory is left for the cache."""

from dataclasses import dataclass

from jaxkv.accelerators import Accelerator, find_accelerator
from jaxkv.errors import JaxkvError, NoMemoryError
from jaxkv.memory_size import format_bytes
from jaxkv.planning.plan import CachePlan

USABLE_SHARE = 0.92
"""Share of a chip's memory that is planned with:
the rest is the runtime's, compiled programs and fragments.
"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Chips of one kind: `tensor_parallel` of them share one copy of the model, `data_parallel` copies run
    side by side, each with a pool of its own.
    """

    accelerator: Accelerator
    tensor_parallel: int = 1
    data_parallel: int = 1

    @property
    def chips(self) -> int:
        return self.tensor_parallel * self.data_parallel


def make_machine(
    accelerator: str, *, chips: int | None = None, tensor_parallel: int = 1, data_parallel: int | None = None
) -> Machine:
    """The machine that is asked for; without `data_parallel` all chips are used.

    Raises JaxkvError for an unknown accelerator, sizes below 1, and chips that do not come out.
    """
    for name, value in (
        ("chips", chips),
        ("tensor_parallel", tensor_parallel),
        ("data_parallel", data_parallel),
    ):
        if value is not None and value < 1:
            raise JaxkvError(f"{name} must be at least 1, got {value}")
    kind = find_accelerator(accelerator)
    if chips is None:
        chips = tensor_parallel * (data_parallel or 1)
    if data_parallel is None:
        data_parallel = chips // tensor_parallel
    if data_parallel * tensor_parallel != chips:
        raise JaxkvError(
            f"{chips} chips are not tensor_parallel {tensor_parallel} x data_parallel {data_parallel}; "
            "change one of the three"
        )
    return Machine(accelerator=kind, tensor_parallel=tensor_parallel, data_parallel=data_parallel)


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Bytes of one chip. The parts sum to `chip_bytes`.

    runtime_bytes: kept free, 1 - USABLE_SHARE. weight_bytes: the chip's share of the weights.
    activation_bytes: what a step needs beside, by the formula of `activation_reserve`.
    """

    chip_bytes: int
    runtime_bytes: int
    weight_bytes: int
    activation_bytes: int

    @property
    def cache_bytes(self) -> int:
        """What is left for the pool; may be negative."""
        return self.chip_bytes - self.runtime_bytes - self.weight_bytes - self.activation_bytes


def memory_budget(machine: Machine, weight_bytes: int, activation_bytes: int) -> MemoryBudget:
    """Divides a chip's memory. Raises NoMemoryError, with the shortfall, where nothing is left for the cache.

    weight_bytes: of the whole model; tensor parallelism divides them.
    """
    figure = machine.accelerator.memory
    if figure is None:
        raise JaxkvError(f"the memory of accelerator {machine.accelerator.name} is the host's: give --memory")
    budget = MemoryBudget(
        chip_bytes=figure.num_bytes,
        runtime_bytes=figure.num_bytes - int(figure.num_bytes * USABLE_SHARE),
        weight_bytes=-(-weight_bytes // machine.tensor_parallel),
        activation_bytes=activation_bytes,
    )
    if budget.cache_bytes <= 0:
        raise NoMemoryError(
            f"no memory is left for the cache: {budget.weight_bytes / 2**30:.2f} GiB of weights and "
            f"{budget.activation_bytes / 2**30:.2f} GiB of activations on a chip with "
            f"{(budget.chip_bytes - budget.runtime_bytes) / 2**30:.2f} GiB usable are "
            f"{-budget.cache_bytes / 2**30:.2f} GiB too many; raise --tensor-parallel or choose a smaller "
            "--weight-dtype"
        )
    return budget


def activation_reserve(
    *, hidden_size: int, widest: int, vocab_size: int, num_tokens: int, num_seqs: int, tensor_parallel: int
) -> int:
    """Bytes that a step needs beside weights and cache: an estimate that is kept free.

    For every token of a step two hidden states in float32 and the widest layer's input and output (2 x
    widest) in 2-byte elements, divided among the chips; for every sequence its logits in float32, twice.
    """
    per_token = 8 * hidden_size + 4 * -(-widest // tensor_parallel)
    return num_tokens * per_token + num_seqs * 8 * -(-vocab_size // tensor_parallel)


def device_warnings(plan: CachePlan, accelerator: Accelerator) -> list[str]:
    """What in the plan will not run well on the accelerator, with the setting to change."""
    warnings = []
    fast, scalar = accelerator.fast_memory, accelerator.scalar_memory
    if fast is not None and scalar is not None and 4 * plan.page_size_bytes > fast.num_bytes:
        warnings.append(
            f"four pages of {format_bytes(plan.page_size_bytes)} (two in flight, two in use) do not fit the "
            f"{format_bytes(fast.num_bytes)} of VMEM: lower --block-size"
        )
    if scalar is not None and plan.groups:
        widest = max(
            group.spec.max_blocks_per_request(plan.limits) * group.blocks_per_state for group in plan.groups
        )
        table = 4 * widest * plan.max_num_seqs
        if table > scalar.num_bytes:
            warnings.append(
                f"a block table of {plan.max_num_seqs} rows x {widest} blocks ({format_bytes(table)}) does "
                f"not fit the {format_bytes(scalar.num_bytes)} of scalar memory: lower --max-num-seqs or "
                "--max-model-len, or raise --block-size"
            )
    return warnings
