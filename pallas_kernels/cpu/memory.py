"""Memory by address, for functions compiled by numba: loads, stores, one atomic, calls of C functions.

Addresses are int64 and in bytes. Nothing is checked.
"""

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pallas_kernels.cpu.instruction import compiled, instruction

INT32, INT64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()


def _loader(numba_type: types.Type, llvm_type: Any) -> Any:
    @instruction(numba_type, types.int64)
    def load(builder: Any, address: Any) -> Any:
        return builder.load(builder.inttoptr(address, llvm_type.as_pointer()))

    return load


def _storer(numba_type: types.Type, llvm_type: Any) -> Any:
    @instruction(types.void, types.int64, numba_type)
    def store(builder: Any, address: Any, value: Any) -> None:
        builder.store(value, builder.inttoptr(address, llvm_type.as_pointer()))

    return store


load_int32 = _loader(types.int32, INT32)
load_int64 = _loader(types.int64, INT64)
load_float32 = _loader(types.float32, FLOAT)
store_int32 = _storer(types.int32, INT32)
store_int64 = _storer(types.int64, INT64)
store_float32 = _storer(types.float32, FLOAT)


@instruction(types.int64, types.int64, types.int64)
def atomic_add(builder: Any, address: Any, value: Any) -> Any:
    """Adds to the int64 at an address, in one order for all threads; gives what was there before."""
    return builder.atomic_rmw("add", builder.inttoptr(address, INT64.as_pointer()), value, "seq_cst")


@instruction(types.int64, types.int64, types.int64)
def call(builder: Any, function: Any, argument: Any) -> Any:
    """function(argument) of a C function at an address: one word in, one word out."""
    return _call(builder, INT64, function, argument)


@instruction(types.void, types.int64, types.int64, types.int64)
def call_with_two(builder: Any, function: Any, *arguments: Any) -> None:
    """function(argument, argument) of a C function at an address: words in, nothing out."""
    _call(builder, ir.VoidType(), function, *arguments)


@instruction(types.void, types.int64, types.int64, types.int64, types.int64)
def call_with_three(builder: Any, function: Any, *arguments: Any) -> None:
    """function(argument, argument, argument) of a C function at an address: words in, nothing out."""
    _call(builder, ir.VoidType(), function, *arguments)


def _call(builder: Any, result: Any, function: Any, *arguments: Any) -> Any:
    pointer = ir.FunctionType(result, [INT64] * len(arguments)).as_pointer()
    return builder.call(builder.inttoptr(function, pointer), arguments)


@instruction(types.int64)
def words_on_stack(builder: Any) -> Any:
    """The address of eight words that last until the calling function returns."""
    return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(INT64, 8)), INT64)


@cache
def address_of(symbol: str) -> Any:
    """`address()`: of a C function of this process by its name, or of one that llvmlite was told of.

    Not the number itself, which is another one in the next process.
    """

    @instruction(types.int64)
    def address(builder: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        return builder.ptrtoint(cgutils.get_or_insert_function(builder.module, kind, symbol), INT64)

    return address


_MALLOC, _FREE = address_of("malloc"), address_of("free")


@compiled
def allocate(size):
    """The address of so many bytes, which `free` gives back."""
    return call(_MALLOC(), size)


@compiled
def free(address):
    """Gives back what `allocate` gave."""
    call(_FREE(), address)
