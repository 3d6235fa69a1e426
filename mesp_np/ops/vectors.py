"""Vectors of the CPU at hand, and LLVM code for them.

Numba has no vector registers.  The few steps that need them (`micro.py`, `packing.py`) write LLVM's
intermediate code instead, from which LLVM makes this CPU's instructions: 8 float32 in a vector
with AVX, 16 with AVX-512, 4 on Arm.
"""

import ctypes
import sys
from functools import cache

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

BYTE, INDEX, PLACE, FLOAT = ir.IntType(8), ir.IntType(64), ir.IntType(32), ir.FloatType()
FEATURES = frozenset(name for name, there in llvm.get_host_cpu_features().items() if there)
ARM = llvm.get_process_triple().startswith(("aarch64", "arm64"))
FUSED = ARM or "fma" in FEATURES                            # else each fused step would be a call of the C library
VECTOR_BYTES = 64 if "avx512f" in FEATURES else 32 if "avx" in FEATURES else 16
VECTORS = 4 if ARM or "avx512f" in FEATURES else 2         # side by side in a panel: of 32 registers, or of 16
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18     # Linux, x86-64


@cache
def tiles_allowed():
    """May this process use the CPU's tile registers?  Linux gives leave for good, if the CPU has them."""
    if "amx-bf16" not in FEATURES or not sys.platform.startswith("linux"):
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0


class Code:
    """Writes LLVM code for vectors of one dtype."""

    def __init__(self, context, builder, dtype):
        self.context, self.builder = context, builder
        self.number = context.get_value_type(dtype)
        self.size = context.get_abi_sizeof(self.number)
        self.lanes = VECTOR_BYTES // self.size
        self.vector = ir.VectorType(self.number, self.lanes)

    def element(self, kind, array, *indices):
        """The address of an element, as a pointer to bytes."""
        found = cgutils.create_struct_proxy(kind)(self.context, self.builder, value=array)
        address = self.builder.bitcast(found.data, BYTE.as_pointer())
        for axis, index in enumerate(indices):
            address = self.builder.gep(address, [self.builder.mul(index, self.stride(kind, array, axis))])
        return address

    def stride(self, kind, array, axis):
        """Bytes from an element to the next along an axis: a constant for the last axis of a contiguous array."""
        if kind.layout == "C" and axis == kind.ndim - 1:
            return INDEX(self.context.get_abi_sizeof(self.context.get_data_type(kind.dtype)))
        found = cgutils.create_struct_proxy(kind)(self.context, self.builder, value=array)
        return self.builder.extract_value(found.strides, axis)

    def least(self, x, y):
        return self.builder.select(self.builder.icmp_signed("<", x, y), x, y)

    def load(self, address, kind):
        value = self.builder.load(self.builder.bitcast(address, kind.as_pointer()))
        value.align = 1
        return value

    def store(self, value, address):
        self.builder.store(value, self.builder.bitcast(address, value.type.as_pointer())).align = self.size

    def prefetch(self, address):
        """Have the line of memory fetched that will be read soon; an address that is not ours does no harm."""
        kind = ir.FunctionType(ir.VoidType(), [address.type] + 3 * [PLACE])
        fetch = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0i8")
        self.builder.call(fetch, [address, PLACE(0), PLACE(3), PLACE(1)])            # to read, into all caches, data

    def shuffled(self, x, y, places):
        """The lanes at these places of x and y, one behind the other."""
        return self.builder.shuffle_vector(x, y, ir.VectorType(PLACE, len(places))(places))

    def filled(self, number, kind):
        """A vector with `number` in every lane."""
        first = self.builder.insert_element(kind(ir.Undefined), number, PLACE(0))
        return self.shuffled(first, first, [0] * kind.count)
