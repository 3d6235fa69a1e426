"""The innermost step with the CPU's tile registers: blocks of pairs of bfloat16.

Shapes    sums   : (HIGH, HIGH)          float32
          room   : (B, steps, 16, 16)    uint32: blocks of 16 rows, of which a step has 16 pairs
          panel  : (16 steps, WIDTH)     uint32: columns of the second factor, a pair for each k (`packing.py`)

Forward   sums_ij = sum_k x_ik y_kj,  x the rows of two blocks of room that follow each other, y HIGH columns

          There are eight registers of 16 x 16 pairs or sums.  Four hold the sums of 2 x 2 blocks; a step loads
          two blocks of x and two of y and multiplies each by each, 16 x 16 x 32 products an instruction.

Bits      A sum depends on its row and its column only.  The instruction sums even and odd k of a step apart;
          by hand, for tests on other CPUs, they are summed one after another.

Source    Intel's Software Developer's Manual, volume 2: TDPBF16PS, LDTILECFG, TILELOADD.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from mesp_np.ops import kernel
from mesp_np.ops.vectors import BYTE, INDEX, VECTOR_BYTES, Code, tiles_allowed

HIGH, SIDE = 32, 16                              # rows and columns of the sums, and of a register
LINE, BLOCK = 4 * SIDE, 4 * SIDE * SIDE          # bytes
PALETTE = bytes([1, *15 * [0], *8 * [LINE, 0], *16 * [0], *8 * [SIDE], *8 * [0]])     # as LDTILECFG has it: all whole
MULTIPLY = """
    tileloadd ($0,$4), %tmm4
    tileloadd ($2,$5), %tmm6
    tdpbf16ps %tmm6, %tmm4, %tmm0
    tileloadd ($3,$5), %tmm7
    tdpbf16ps %tmm7, %tmm4, %tmm1
    tileloadd ($1,$4), %tmm5
    tdpbf16ps %tmm6, %tmm5, %tmm2
    tdpbf16ps %tmm7, %tmm5, %tmm3"""


def multiply_blocks(sums, room, block, panel, column):
    """sums = blocks `block` and `block + 1` of room times HIGH columns of the panel."""


@overload(multiply_blocks)
def _multiply_blocks(sums, room, block, panel, column):
    if tiles_allowed() and VECTOR_BYTES == LINE:
        return lambda sums, room, block, panel, column: _by_instruction(sums, room, block, panel, column)
    return lambda sums, room, block, panel, column: _by_hand(sums, room, block, panel, column)


@intrinsic
def _by_instruction(typing_context, sums, room, block, panel, column):
    signature = types.void(sums, room, types.int64, panel, types.int64)

    def codegen(context, builder, signature, args):
        sums_type, room_type, _, panel_type, _ = signature.args
        sums, room, block, panel, column = args
        code = Code(context, builder, types.float32)
        shape = cgutils.create_struct_proxy(room_type)(context, builder, value=room).shape
        steps = builder.extract_value(shape, 1)
        zero, line, across = INDEX(0), INDEX(LINE), code.stride(panel_type, panel, 0)
        x = [code.element(room_type, room, builder.add(block, INDEX(b)), zero, zero, zero) for b in (0, 1)]
        y = [code.element(panel_type, panel, zero, builder.add(column, INDEX(b))) for b in (0, SIDE)]
        palette = cgutils.global_constant(builder, "palette", ir.Constant(ir.ArrayType(BYTE, LINE), bytearray(PALETTE)))
        _assemble(builder, "ldtilecfg ($0)", palette)
        _assemble(builder, "\n".join(f"tilezero %tmm{t}" for t in range(4)))
        with cgutils.for_range(builder, steps, intp=INDEX) as loop:
            right, down = (builder.mul(loop.index, INDEX(BLOCK)),
                           builder.mul(loop.index, builder.mul(across, INDEX(SIDE))))
            places = [builder.gep(start, [right]) for start in x] + [builder.gep(start, [down]) for start in y]
            _assemble(builder, MULTIPLY, *places, line, across)
        for t in range(4):
            place = code.element(sums_type, sums, INDEX(t // 2 * SIDE), INDEX(t % 2 * SIDE))
            _assemble(builder, f"tilestored %tmm{t}, ($0,$1)", place, code.stride(sums_type, sums, 0))
        _assemble(builder, "tilerelease")

    return signature, codegen


def _assemble(builder, text, *values):
    """Instructions with these values in registers; they read and write memory, and stay in their order."""
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    builder.call(ir.InlineAsm(kind, text, ",".join(["r"] * len(values) + ["~{memory}"]), side_effect=True), values)


@kernel
def _by_hand(sums, room, block, panel, column):
    for i in range(HIGH):
        for j in range(min(HIGH, panel.shape[1] - column)):
            total = np.float32(0)
            for s in range(room.shape[1]):
                for k in range(SIDE):
                    x, y = room[block + i // SIDE, s, i % SIDE, k], panel[s * SIDE + k, column + j]
                    total += _lower(x) * _lower(y)
                    total += _upper(x) * _upper(y)
            sums[i, j] = total


@kernel
def _lower(pair):
    return np.uint32(pair << np.uint32(16)).view(np.float32)


@kernel
def _upper(pair):
    return np.uint32(pair & np.uint32(0xFFFF0000)).view(np.float32)
