"""Packing: columns of a factor laid side by side for each k, straight from the form they are stored in.

Shapes    panels  : (P, lines, WIDTH)    WIDTH columns in each, one vector or as many as the registers hold;
                                         a line for each k
          source  : (depth, N) of a product's second factor, or (N, depth) if it is stored turned

Forward   panels[p, k, j] = source_k(p WIDTH + j);  zeros beside the last column

Pairs     Panels of uint32 hold pairs of bfloat16 (`bf16.py`), the numbers of 2 k in the lower half and of
          2 k + 1 in the upper, so they have half as many lines; zeros below the last.

The numbers of a row are read LANES at a time and widened, or rounded, in the registers: a line of a
panel is a piece of a row as it stands, or of two; of a turned factor, LANES x LANES elements are
transposed in the registers.  What does not fill a vector is moved one by one.

Saved      nothing
Recomputed nothing
Cost       no FLOPs

Source     the forms are `quant.py`'s
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from mesp_np.ops import kernel
from mesp_np.ops.bf16 import pair
from mesp_np.ops.quant import number
from mesp_np.ops.vectors import BYTE, FEATURES, FLOAT, INDEX, PLACE, VECTOR_BYTES, Code

AHEAD = 8                # rows from one that is moved to the one that is fetched meanwhile
HALF = ir.IntType(16)
BF16 = 2
HALVES = {types.int16: 1, types.uint16: BF16}          # as `quant.factor` passes them -> as `quant.number` calls them


@kernel
def pack(panels, source, turned, columns, depth):
    """Fill panels with `columns` columns, of `depth` numbers, of `source`, a tuple that `part` made."""
    lanes, lines, width = VECTOR_BYTES // panels.itemsize, depth // _numbers_in(panels), panels.shape[2]
    across = columns - columns % lanes if _in_line(source) else 0
    down, count = lines - lines % lanes if turned else lines, -(-across // width)
    if turned:
        for p in range(count):
            for j in range(0, min(width, across - p * width), lanes):
                for k in range(0, down, lanes):
                    _move_transposed(panels, p, k, j, source, p * width + j)
    else:
        for k in range(down):
            for p in range(count):
                for j in range(0, min(width, across - p * width), lanes):
                    _move_vector(panels, p, k, j, source, p * width + j)
    for j in range(-(-columns // width) * width):
        for k in range(down if j < across else 0, panels.shape[1]):
            panels[j // width, k, j % width] = _element(panels, source, turned, j, k, depth) if j < columns else 0


@kernel
def pack_blocks(blocks, source, rows, columns):
    """Fill blocks (B, steps, 16, 16) with pairs of these rows and columns of `source`: 16 rows, 16 pairs a step.

    Zeros beside the last column; rows below the last of all stay as they are.
    """
    steps, lanes = blocks.shape[1], VECTOR_BYTES // blocks.itemsize
    whole = (columns[1] - columns[0]) // 32 if _in_line(source) else 0
    for i in range(rows[1] - rows[0]):
        b, r = i // 16, i % 16
        for s in range(whole):
            for k in range(0, 16, lanes):
                _move_along(blocks, b, s, r, k, source, rows[0] + i, columns[0] + 32 * s + 2 * k)
        for k in range(16 * whole, 16 * steps):
            column = columns[0] + 2 * k
            even = _number(source, rows[0] + i, column) if column < columns[1] else np.float32(0)
            odd = _number(source, rows[0] + i, column + 1) if column + 1 < columns[1] else np.float32(0)
            blocks[b, k // 16, r, k % 16] = pair(even, odd)


def _numbers_in(panels):
    """How many numbers an element of these panels holds."""


@overload(_numbers_in)
def _numbers_in_dtype(panels):
    many = 2 if panels.dtype == types.uint32 else 1
    return lambda panels: many


def _element(panels, source, turned, j, k, depth):
    """The element of column j and line k, at whatever place."""


@overload(_element)
def _element_by_dtype(panels, source, turned, j, k, depth):
    def one(panels, source, turned, j, k, depth):
        return _number(source, j, k) if turned else _number(source, k, j)

    def two(panels, source, turned, j, k, depth):
        even, odd = np.float32(0), np.float32(0)
        if 2 * k < depth:
            even = _number(source, j, 2 * k) if turned else _number(source, 2 * k, j)
        if 2 * k + 1 < depth:
            odd = _number(source, j, 2 * k + 1) if turned else _number(source, 2 * k + 1, j)
        return pair(even, odd)

    return two if panels.dtype == types.uint32 else one


def part(weight, scratch, rows, columns):
    """The part rows[0] <= row < rows[1], columns[0] <= column < columns[1] of what `quant.factor` made.

    Scales and biases become numbers of the run's dtype, in `scratch`.
    """


@overload(part)
def _part(weight, scratch, rows, columns):
    def numbers(weight, scratch, rows, columns):
        return (weight[0][rows[0]:rows[1], columns[0]:columns[1]],)

    def codes(weight, scratch, rows, columns):
        codes, scales, biases, form, shift, first = weight
        height, start, last = rows[1] - rows[0], first + columns[0], first + columns[1] - 1
        groups = (last >> shift) - (start >> shift) + 1
        wide = scratch[:2 * height * groups].reshape(2, height, groups)
        for i in range(height):
            for g in range(groups):
                wide[0, i, g] = number(scales[rows[0] + i, (start >> shift) + g], form)
                wide[1, i, g] = number(biases[rows[0] + i, (start >> shift) + g], form)
        return codes[rows[0]:rows[1]], wide, shift, start

    return numbers if len(weight) == 1 else codes


def _in_line(source):
    """Do the numbers of a row stand side by side, so that a vector of them can be read?"""


@overload(_in_line)
def _in_line_by_form(source):
    if len(source) == 1:
        return lambda source: source[0].strides[1] == source[0].itemsize
    return lambda source: source[3] % 32 == 0


def _number(source, row, column):
    """One number of a part, at whatever place."""


@overload(_number)
def _number_by_form(source, row, column):
    def codes(source, row, column):
        codes, wide, shift, first = source
        place, group = first + column, ((first + column) >> shift) - (first >> shift)
        code = (codes[row, place // per] >> np.uint32(place % per * 4)) & np.uint32(most)
        return wide[0, row, group] * wide.dtype.type(code) + wide[1, row, group]

    if len(source) == 1:
        form = HALVES.get(source[0].dtype)
        if form is None:
            return lambda source, row, column: source[0][row, column]
        return lambda source, row, column: number(np.uint16(source[0][row, column]), form)
    per, most = (8, 15) if source[0].dtype == types.uint32 else (1, 255)
    return codes


class _Stored:
    """Writes code that reads a part of a stored weight, as elements of panels of a dtype."""

    def __init__(self, context, builder, dtype, kind, source):
        self.paired = dtype == types.uint32
        self.code, self.kinds = Code(context, builder, types.float32 if self.paired else dtype), kind.types
        self.arrays = [builder.extract_value(source, i) for i in range(len(self.kinds))]
        self.words = ir.VectorType(PLACE, self.code.lanes)
        self.is_bf16 = HALVES.get(self.kinds[0].dtype) == BF16

    def line(self, k, column):
        """LANES elements of a line: numbers of row k as they stand side by side, or of rows 2 k and 2 k + 1."""
        if not self.paired:
            return self.numbers(k, column)
        builder, row = self.code.builder, self.first_of(k)
        even, odd = (self._upper(at, column) for at in (row, builder.add(row, INDEX(1))))
        return builder.or_(builder.lshr(even, self.words([16] * self.code.lanes)), odd)

    def along(self, row, column):
        """LANES elements of a row, which stand behind each other: pairs are of twice as many numbers."""
        if not self.paired:
            return self.numbers(row, column)
        builder, lanes = self.code.builder, self.code.lanes
        if self.is_bf16:
            return self.code.load(self.address(row, column), self.words)
        if "avx512bf16" in FEATURES and lanes == 16:
            return self._converted(*(self.numbers(row, builder.add(column, INDEX(at))) for at in (0, lanes)))
        uppers = [self._upper(row, builder.add(column, INDEX(at))) for at in (0, lanes)]
        even, odd = (self.code.shuffled(*uppers, list(range(first, 2 * lanes, 2))) for first in (0, 1))
        return builder.or_(builder.lshr(even, self.words([16] * lanes)), odd)

    def first_of(self, k):
        """The number of the factor that element k begins with."""
        return self.code.builder.mul(k, INDEX(2)) if self.paired else k

    def _converted(self, first, second):
        """Both vectors, one behind the other, rounded to pairs of bfloat16 by the instruction."""
        kind = ir.FunctionType(self.words, [first.type, second.type])
        return self.code.builder.call(ir.InlineAsm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v"), [first, second])

    def _upper(self, row, column):
        """The bits of LANES numbers of a row, rounded to bfloat16; `bf16.upper_half` says how."""
        builder, every = self.code.builder, lambda n: self.words([n] * self.code.lanes)
        if self.is_bf16:
            halves = self.code.load(self.address(row, column), ir.VectorType(HALF, self.code.lanes))
            return builder.shl(builder.zext(halves, self.words), every(16))
        number = self.numbers(row, column)
        bits = builder.bitcast(number, self.words)
        even = builder.and_(builder.lshr(bits, every(16)), every(1))
        nearest = builder.add(bits, builder.add(even, every(0x7FFF)))
        nan = builder.fcmp_unordered("uno", number, number)
        return builder.and_(builder.select(nan, builder.or_(bits, every(0x400000)), nearest), every(0xFFFF0000))

    def address(self, row, column):
        """Of a number, or of the byte in which its code begins."""
        builder, dtype = self.code.builder, self.kinds[0].dtype
        if len(self.kinds) == 1:
            return self.code.element(self.kinds[0], self.arrays[0], row, column)
        place = builder.add(column, self.arrays[3])
        if dtype == types.uint32:
            place = builder.lshr(place, INDEX(1))
        return builder.gep(self.code.element(self.kinds[0], self.arrays[0], row), [place])

    def numbers(self, row, column):
        """LANES numbers of a row, as a vector of the run's dtype."""
        dtype, address = self.kinds[0].dtype, self.address(row, column)
        if len(self.kinds) > 1:
            return self._decoded(address, row, column)
        if dtype in HALVES:
            return self._cast(self._widened(self.code.load(address, ir.VectorType(HALF, self.code.lanes)), dtype))
        kind = ir.VectorType(self.code.context.get_value_type(dtype), self.code.lanes)
        return self._cast(self.code.load(address, kind))

    def _widened(self, halves, dtype):
        """float32 of 16-bit numbers; `quant.number` says how."""
        builder, words = self.code.builder, ir.VectorType(PLACE, self.code.lanes)
        floats, every = ir.VectorType(FLOAT, self.code.lanes), lambda n: words([n] * self.code.lanes)
        word = builder.zext(halves, words)
        if HALVES[dtype] == 2:
            return builder.bitcast(builder.shl(word, every(16)), floats)
        moved = builder.shl(builder.and_(word, every(0x7FFF)), every(13))
        small = builder.bitcast(moved, floats)
        size = builder.bitcast(builder.fmul(small, floats([2.0 ** 112] * self.code.lanes)), words)
        size = builder.select(builder.icmp_unsigned(">=", moved, every(0x7C00 << 13)),
                              builder.or_(moved, every(0x7F800000)), size)
        sign = builder.shl(builder.and_(word, every(0x8000)), every(16))
        return builder.bitcast(builder.or_(size, sign), floats)

    def _decoded(self, address, row, column):
        """scale q + bias, for codes q of one group: with 4 bits, two from each byte, the lower half first."""
        code, builder, lanes = self.code, self.code.builder, self.code.lanes
        words = ir.VectorType(PLACE, lanes)
        if self.kinds[0].dtype == types.uint32:
            bytes_ = code.load(address, ir.VectorType(BYTE, lanes // 2))
            twice = builder.zext(code.shuffled(bytes_, bytes_, [lane // 2 for lane in range(lanes)]), words)
            q = builder.and_(builder.lshr(twice, words([0, 4] * (lanes // 2))), words([15] * lanes))
        else:
            q = builder.zext(code.load(address, ir.VectorType(BYTE, lanes)), words)
        shift, first = self.arrays[2:]
        group = builder.sub(builder.lshr(builder.add(first, column), shift), builder.lshr(first, shift))
        places = (code.element(self.kinds[1], self.arrays[1], INDEX(i), row, group) for i in range(2))
        scale, bias = (code.filled(code.load(place, code.number), code.vector) for place in places)
        return builder.fadd(builder.fmul(scale, builder.uitofp(q, code.vector)), bias)

    def _cast(self, vector):
        """To the run's dtype."""
        builder, wanted = self.code.builder, self.code.vector
        if vector.type == wanted:
            return vector
        return builder.fpext(vector, wanted) if wanted.element != FLOAT else builder.fptrunc(vector, wanted)


@intrinsic
def _move_vector(typing_context, panels, p, k, j, source, column):
    """panels[p, k, j:j+LANES] = line k of the source from `column` on; fetches what is moved AHEAD rows later."""
    signature = types.void(panels, types.int64, types.int64, types.int64, source, types.int64)

    def codegen(context, builder, signature, args):
        panels_type, _, _, _, source_type, _ = signature.args
        panels, p, k, j, source, column = args
        stored = _Stored(context, builder, panels_type.dtype, source_type, source)
        code, ahead = stored.code, builder.add(stored.first_of(k), INDEX(AHEAD))
        code.prefetch(stored.address(ahead, column))
        code.store(stored.line(k, column), code.element(panels_type, panels, p, k, j))

    return signature, codegen


@intrinsic
def _move_along(typing_context, blocks, b, s, r, k, source, row, column):
    """blocks[b, s, r, k:k+LANES] = elements of a row of the source from `column` on."""
    signature = types.void(blocks, *4 * [types.int64], source, types.int64, types.int64)

    def codegen(context, builder, signature, args):
        blocks, *place, source, row, column = args
        stored = _Stored(context, builder, signature.args[0].dtype, signature.args[5], source)
        stored.code.store(stored.along(row, column), stored.code.element(signature.args[0], blocks, *place))

    return signature, codegen


@intrinsic
def _move_transposed(typing_context, panels, p, k, j, source, row):
    """panels[p, k:k+LANES, j:j+LANES] = the elements k to k+LANES-1 of rows row to row+LANES-1 of the source, turned.

    In step s = 1, 2, 4, ... rows whose numbers differ in that bit swap the lanes whose numbers differ
    in it the other way; after all steps, row and lane have changed places.
    """
    signature = types.void(panels, types.int64, types.int64, types.int64, source, types.int64)

    def codegen(context, builder, signature, args):
        panels_type, _, _, _, source_type, _ = signature.args
        panels, p, k, j, source, row = args
        stored = _Stored(context, builder, panels_type.dtype, source_type, source)
        code, lanes, step = stored.code, stored.code.lanes, 1
        rows = [stored.along(builder.add(row, INDEX(r)), stored.first_of(k)) for r in range(lanes)]
        while step < lanes:
            upper = [lane + lanes - step if lane & step else lane for lane in range(lanes)]
            lower = [lane + lanes if lane & step else lane + step for lane in range(lanes)]
            for r in (r for r in range(lanes) if not r & step):
                pair = rows[r], rows[r + step]
                rows[r], rows[r + step] = (code.shuffled(*pair, places) for places in (upper, lower))
            step *= 2
        for r in range(lanes):
            code.store(rows[r], code.element(panels_type, panels, p, builder.add(k, INDEX(r)), j))

    return signature, codegen
