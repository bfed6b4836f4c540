"""Decodes on a TPU: one slab of one sequence's state after another, in and out of VMEM.

    a group of sequences     operands are copied and made ready for all of them at once
    a step: one slab         copied in, computed, copied out; meanwhile the next one is made ready

What is made ready has a long latency (turning rows into columns, one number to all lanes), which hides behind
the arithmetic on the state of the step before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.tpu.copies import AHEAD, Copies, PartTables
from pallas_kernels.recurrent.tpu.group_copies import GroupCopies
from pallas_kernels.recurrent.tpu.slabs import SlabPlan
from pallas_kernels.recurrent.tpu.step import Step

TOGETHER = 8
"""Sequences of a group at most."""


def group_size(rows: int) -> int:
    """Sequences of a group where a step has `rows`."""
    return min(TOGETHER, rows)


class DecodeOperand(NamedTuple):
    """An array `[S, ...]` of which a group sees its sequences', or (`shared`) one that all see whole."""

    array: jax.Array
    shared: bool = False

    def spec(self, group: Callable[..., Any]) -> pl.BlockSpec:
        """Blocks of some sequences: `group(step, ...)` is the number of a grid step's block."""
        zeros = (0,) * (self.array.ndim - 1)
        if self.shared:
            return pl.BlockSpec(self.array.shape, lambda *_: (0, *zeros))
        block = (group_size(self.array.shape[0]), *self.array.shape[1:])
        return pl.BlockSpec(block, lambda *at: (group(*at), *zeros))


class DecodeResult(NamedTuple):
    """Outputs `[S, ...]`, of any value for rows that are not decodes, and the pool."""

    out: jax.Array
    pages: jax.Array


class At(NamedTuple):
    """A slab of sequence number `row`, number `seq` of its group. slot: 0 and 1 in turns, step after step."""

    row: Any
    seq: Any
    slab: Any
    slot: Any


def nothing(*_: Any) -> None:
    """No work."""


@dataclass(frozen=True, kw_only=True)
class DecodeLoop:
    """One token of every decode.

    prepare(operand refs, scratch refs, beside): makes a group ready; beside: buffers `uint32[together, rows,
    128]` in and out of another part of its states, or None.
    ahead(at, scratch refs): makes one slab ready.
    compute(at, in_buffer, out_buffer, operand refs, scratch refs, out_ref): one slab. Operands here begin
    with those in SMEM, which are there as a whole.
    scratch: memory. out: an operand of the shape of the outputs.
    """

    num_slabs: int
    compute: Callable[..., None]
    out: DecodeOperand
    name: str
    prepare: Callable[..., None] = nothing
    ahead: Callable[..., None] = nothing
    scratch: tuple[Any, ...] = ()

    def run(
        self,
        operands: list[DecodeOperand],
        step: Step,
        *,
        in_smem: tuple[jax.Array, ...] = (),
        beside: StatePlace | None = None,
    ) -> DecodeResult:
        """Steps over all rows of the table; only decodes cost anything. `beside`: see `prepare`."""
        pages, batch, table, place, interpret = step
        rows = table.read.shape[0]
        plan = SlabPlan.of(place, self.num_slabs)
        tables = PartTables.of(batch, table, place, beyond=max(AHEAD, 2 * TOGETHER))
        scalars, structure = jax.tree.flatten(
            (batch.num_decodes.reshape(1).astype(jnp.int32), tables, in_smem)
        )
        together = group_size(rows)
        beside_plan = None if beside is None else SlabPlan.of(beside, 1)

        def group(index, num_decodes, *_):
            # Groups without decodes ask for the last one's block, so nothing is copied for them.
            return jnp.minimum(index, jnp.maximum(num_decodes[0] - 1, 0) // together)

        def kernel(*refs) -> None:
            num_decodes_ref, part, smem_refs = structure.unflatten(refs[: len(scalars)])
            operand_refs = [*smem_refs, *refs[len(scalars) : len(scalars) + len(operands)]]
            _, out_ref, pages_ref, *scratch = refs[len(scalars) + len(operands) :]
            copies, groups = Copies(plan, part, pages_ref, *scratch[:4]), None
            num_decodes, own = num_decodes_ref[0], scratch[4:]
            if beside_plan is not None:
                groups = GroupCopies(beside_plan, part, together, pages_ref, *own[-4:])
                own = own[:-4]
            self._kernel(num_decodes, together, copies, groups, operand_refs, out_ref, own)

        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        out, pages = pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=(-(-rows // together),),
                in_specs=[*(operand.spec(group) for operand in operands), anywhere],
                out_specs=[self.out.spec(group), anywhere],
                scratch_shapes=[
                    *Copies.scratch(plan),
                    *self.scratch,
                    *([] if beside_plan is None else GroupCopies.scratch(beside_plan, together)),
                ],
            ),
            out_shape=[
                jax.ShapeDtypeStruct(self.out.array.shape, jnp.float32),
                jax.ShapeDtypeStruct(pages.shape, pages.dtype),
            ],
            input_output_aliases={len(scalars) + len(operands): 1},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary",), disable_bounds_checks=True
            ),
            interpret=interpret,
            name=self.name,
        )(*scalars, *(operand.array for operand in operands), pages)
        return DecodeResult(out, pages)

    def _kernel(
        self,
        num_decodes,
        together: int,
        copies: Copies,
        groups: GroupCopies | None,
        operand_refs,
        out_ref,
        scratch,
    ) -> None:
        """One group of sequences."""
        group = pl.program_id(0)
        first = group * together
        stop = jnp.minimum(first + together, num_decodes)
        last_step = stop * self.num_slabs - 1

        def at(step, parity: int) -> At:
            row, slab = step, 0
            if self.num_slabs > 1:
                row, slab = lax.div(step, self.num_slabs), lax.rem(step, self.num_slabs)
            return At(row, row - first, slab, parity)

        def one_step(step, parity: int) -> None:
            in_buffer, out_buffer = copies.take(step), copies.room(step)
            self.compute(at(step, parity), in_buffer, out_buffer, operand_refs, scratch, out_ref)
            self.ahead(at(jnp.minimum(step + 1, last_step), 1 - parity), scratch)
            copies.give(step)

        def two_steps(pair, _) -> None:
            step = first * self.num_slabs + 2 * pair
            one_step(step, 0)

            @pl.when(step < last_step)
            def _():
                one_step(step + 1, 1)

        if groups is not None:

            @pl.when(group == 0)
            def _():
                groups.fetch(0)

            groups.fetch(group + 1)
        copies.open(group == 0)

        @pl.when(first < stop)
        def _():
            beside = None if groups is None else (groups.take(group), groups.room(group))
            self.prepare(operand_refs, scratch, beside)
            self.ahead(at(first * self.num_slabs, 0), scratch)
            if groups is not None:
                groups.give(group)
            lax.fori_loop(0, ((stop - first) * self.num_slabs + 1) // 2, two_steps, None)

        is_last = (first < stop) & (stop == num_decodes)
        copies.close(is_last, num_decodes * self.num_slabs)
        if groups is not None:
            pl.when(is_last)(lambda: groups.close(group))
