"""The innermost step of every matrix product, in the CPU's vector registers.

Shapes    out   : (BLOCK, WIDTH)    a block of the output; where columns are few, (TALL, LANES)
          a     : (BLOCK, depth)    rows of the first factor, wherever they stand
          panel : (depth, WIDTH)    columns of the second factor, side by side for each k

Forward   out_ij = scale sum_k a_ik panel_kj, or out_ij += that

          The block's sums stay in registers: BLOCK rows of VECTORS vectors, or TALL rows of one.  For each k
          the kernel loads the vectors of the panel, fills one vector with a_ik for each row, and
          multiplies and adds BLOCK * VECTORS times.  Each sum is formed from the first k to the last, whatever
          the rest of the block is.

Pairs     With --compute bf16 on a CPU that can do it, an element of a and of panel is a pair of
          bfloat16 numbers, k even in the lower half and k odd in the upper, and a step adds two
          products at once.

Source    Goto and van de Geijn, Anatomy of high-performance matrix multiplication, 2008; the block of
          registers as in BLIS, Van Zee and van de Geijn, 2015.
"""

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mesp_np.ops.matmul import BLOCK
from mesp_np.ops.vectors import FEATURES, FUSED, INDEX, PLACE, VECTOR_BYTES, VECTORS, Code

TALL = BLOCK * VECTORS                           # rows of a block of one vector

llvm.initialize_native_asmparser()               # without it, inline assembly ends the process


@intrinsic
def multiply_block(typing_context, out, i, j, a, row, k, rows, panel, depth, add, scale):
    """out[i:i+BLOCK, j:j+WIDTH] = scale a[row:row+BLOCK, k:k+depth] panel[:depth], or += that; a panel of LANES
    columns goes with a block of TALL rows.

    `rows` of a block are there, or fewer; the last one stands in for those that are not, and is written
    as often, each time the same.
    """
    signature = types.void(out, types.int64, types.int64, a, types.int64, types.int64, types.int64, panel,
                           types.int64, types.boolean, out.dtype)

    def codegen(context, builder, signature, args):
        out_type, _, _, a_type, _, _, _, panel_type = signature.args[:8]
        out, i, j, a, row, k, rows, panel, depth, add, scale = args
        code = Code(context, builder, out_type.dtype)
        paired = panel_type.dtype == types.uint32
        step = _multiply_add if not paired else _dot_pairs if "avx512bf16" in FEATURES else _dot_pairs_by_hand
        kind = ir.VectorType(PLACE, code.lanes) if paired else code.vector
        last, first = builder.sub(rows, INDEX(1)), code.element(panel_type, panel, INDEX(0), INDEX(0))

        def block(high, vectors):
            lines = [code.least(INDEX(r), last) for r in range(high)]
            starts = [code.element(a_type, a, builder.add(row, line), k) for line in lines]
            corners = [code.element(out_type, out, builder.add(i, line), j) for line in lines]
            sums = _sums(code, vectors, starts, code.stride(a_type, a, 1), first, depth, kind, step)
            _put(code, sums, corners, add, scale)

        narrow = builder.icmp_signed("==", code.stride(panel_type, panel, 0), INDEX(VECTOR_BYTES))
        with builder.if_else(narrow) as (then, otherwise):
            with then:
                block(TALL, 1)
            with otherwise:
                block(BLOCK, VECTORS)

    return signature, codegen


def _sums(code, vectors, starts, stride, panel, depth, kind, step):
    """The sums of a block: for each row a list of so many places that hold a vector."""
    builder, line = code.builder, vectors * VECTOR_BYTES
    sums = [[cgutils.alloca_once_value(builder, code.vector(None)) for _ in range(vectors)] for _ in starts]
    with cgutils.for_range(builder, depth, intp=INDEX) as loop:
        here, along = builder.gep(panel, [builder.mul(loop.index, INDEX(line))]), builder.mul(loop.index, stride)
        columns = [code.load(builder.gep(here, [INDEX(v * VECTOR_BYTES)]), kind) for v in range(vectors)]
        for start, row in zip(starts, sums, strict=True):
            number = code.filled(code.load(builder.gep(start, [along]), kind.element), kind)
            for place, column in zip(row, columns, strict=True):
                builder.store(step(code, builder.load(place), number, column), place)
    return sums


def _put(code, sums, corners, add, scale):
    """Into the output, at these corners of its rows: scale times the sums, or what is there plus that."""
    builder, scales = code.builder, code.filled(scale, code.vector)
    places = [(place, builder.gep(corner, [INDEX(v * VECTOR_BYTES)]))
              for row, corner in zip(sums, corners, strict=True) for v, place in enumerate(row)]
    for place, _ in places:
        builder.store(builder.fmul(scales, builder.load(place)), place)
    with builder.if_then(add):
        for place, address in places:
            builder.store(builder.fadd(code.load(address, code.vector), builder.load(place)), place)
    for place, address in places:
        code.store(builder.load(place), address)


def _multiply_add(code, total, x, y):
    """total + x y, rounded once where the CPU can."""
    if not FUSED:
        return code.builder.fadd(total, code.builder.fmul(x, y))
    kind = code.vector
    name = f"llvm.fma.v{code.lanes}f{8 * code.size}"
    fma = cgutils.get_or_insert_function(code.builder.module, ir.FunctionType(kind, 3 * [kind]), name)
    return code.builder.call(fma, [x, y, total])


def _dot_pairs(code, total, x, y):
    """total + x_even y_even + x_odd y_odd of pairs of bfloat16, by the instruction."""
    kind = ir.FunctionType(code.vector, [code.vector, x.type, y.type])
    instruction = ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", side_effect=False)
    return code.builder.call(instruction, [total, x, y])


def _dot_pairs_by_hand(code, total, x, y):
    """The same by shifts and two products, for tests of all that is around the instruction."""
    shift, mask = (code.filled(PLACE(number), x.type) for number in (16, 0xFFFF0000))
    for half in (lambda pair: code.builder.and_(pair, mask), lambda pair: code.builder.shl(pair, shift)):
        total = _multiply_add(code, total, *(code.builder.bitcast(half(pair), code.vector) for pair in (x, y)))
    return total
