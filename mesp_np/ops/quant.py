"""Stored forms of a weight: how the bytes of a checkpoint become numbers, a tile at a time.

Shapes    stored, out    : (rows, columns)        any tile of a weight
          codes          : (rows, columns * bits / 32)    uint32 words of a quantised weight
          scales, biases : (rows, columns / group)        one of each for `group` numbers of a row

Stored forms
    float32, float64     the numbers themselves
    float16              its bits as uint16, for the kernels
    uint16               bfloat16: the upper half of a float32.  NumPy has no such type,
                         so its bits are kept as uint16; shifting them up by 16 places
                         and reading the result as float32 is exact for every pattern,
                         infinities, NaNs and subnormals included.
    Quantised            codes q of 4 or 8 bits, the first number in the lowest bits of its
                         word, and for each group of 32, 64 or 128 a scale and a bias:
                             w = scale q + bias,
                         formed in the run's dtype from exactly widened scales and biases.

Rounding to bfloat16 (`round_bf16`) goes to the nearest, ties to even: add 0x7FFF plus
the lowest bit that stays, then cut.  A NaN must skip the addition, which could carry
its payload into the sign; it keeps its upper half, so every bfloat16 survives the way out
and back.

Rounding to codes (`quantise`) spreads the 2^bits values evenly between the extremes of a
group, from the one that is larger in magnitude, the edge: scale = (max - min) / (2^bits - 1),
with the sign that leads from the edge to the other extreme, and q = (w - bias) / scale to the nearest.
The scale is then adjusted to edge / round(edge / scale), so that zero has a code of its own and
stays zero.

Source    IEEE 754 binary32; the bfloat16 layout of the safetensors format (dtype BF16);
          MLX's affine mode, mlx.core.quantize and dequantize.
"""

import numpy as np

from mesp_np.ops import kernel

BF16 = np.dtype(np.uint16)
BITS, GROUPS = (4, 8), (32, 64, 128)
SMALLEST_SCALE = np.float32(1e-7)
SCALE_FORMS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, BF16: 2}    # as kernels call them


class Quantised:
    """A weight stored as codes, which slices and transposes like the array (out, in) that it stands for.

    codes           (out, in * bits / 32) uint32
    scales, biases  (out, in / group) float32, float16 or BF16
    """

    dtype, ndim = np.dtype(np.uint32), 2

    def __init__(self, codes, scales, biases, bits, columns=None, transposed=False):
        self.codes, self.scales, self.biases, self.bits = codes, scales, biases, bits
        self.columns = range(codes.shape[1] * 32 // bits) if columns is None else columns
        self.transposed = transposed

    @property
    def group(self):
        """How many numbers share a scale and a bias."""
        return self.codes.shape[1] * 32 // self.bits // self.scales.shape[1]

    @property
    def shape(self):
        return self._turned((len(self.codes), len(self.columns)))

    @property
    def strides(self):
        """Steps along the two axes, in numbers: which of them runs along a row of codes."""
        return self._turned((len(self.columns), 1))

    @property
    def size(self):
        return len(self.codes) * len(self.columns)

    @property
    def nbytes(self):
        """Bytes of codes, scales and biases of these rows."""
        return self.codes.nbytes + self.scales.nbytes + self.biases.nbytes

    @property
    def T(self):
        return Quantised(self.codes, self.scales, self.biases, self.bits, self.columns, not self.transposed)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, index):
        """Slices of the two axes, or of the first; columns of (out, in) from a whole byte of codes on."""
        axes = index if isinstance(index, tuple) else (index, slice(None))
        rows, columns = self._turned(axes)
        return Quantised(self.codes[rows], self.scales[rows], self.biases[rows], self.bits, self.columns[columns],
                         self.transposed)

    def _turned(self, pair):
        return pair[::-1] if self.transposed else pair


def part_shapes(shape, bits, group):
    """Shapes of the codes, scales and biases of a weight of `shape` (out, in)."""
    rows, width = shape
    return (rows, width * bits // 32), (rows, width // group), (rows, width // group)


def widen(out, stored):
    """out = the numbers that `stored`, an array or Quantised that is not transposed, stands for."""
    if stored.dtype.kind in "fi" and stored.dtype.itemsize > 2:
        np.copyto(out, stored)
        return
    if isinstance(stored, Quantised):
        codes, first = stored.codes.view(np.uint8), stored.columns.start
        _widen_codes(out, codes, *_scales(stored), stored.bits, stored.group, first)
    else:
        _widen_halves(out, stored.view(np.uint16), SCALE_FORMS[stored.dtype])


def factor(stored):
    """What the kernels of a product take for a stored weight that is not transposed.

    (numbers,) with bfloat16 as uint16 and float16 as int16, or for codes (words of 4-bit or bytes of 8-bit codes,
    scales, biases, their form, the power of 2 that a group is, first column).
    """
    if isinstance(stored, Quantised):
        codes = stored.codes if stored.bits == 4 else stored.codes.view(np.uint8)
        return codes, *_scales(stored), stored.group.bit_length() - 1, stored.columns.start
    return (stored.view(np.int16) if stored.dtype == np.float16 else stored,)


def _scales(stored):
    """Scales and biases as whole numbers of their bits, and how their form is called."""
    scales, biases = (part.view(f"u{part.itemsize}") for part in (stored.scales, stored.biases))
    return scales, biases, SCALE_FORMS[stored.scales.dtype]


def from_bf16(bits):
    """bfloat16 bits (uint16) as float32: the upper half of the same number."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_bf16(values):
    """float32 values as bfloat16 bits (uint16), to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    upper = bits >> 16
    rounded = (bits + 0x7FFF + (upper & 1)) >> 16
    nan = np.where(upper & 0x7F, upper, upper | 1)         # a payload in the lower half only must not become infinity
    return np.where(np.isnan(values), nan, rounded).astype(BF16)


def quantise(values, bits, group):
    """(codes, scales, biases) of float32 values (rows, columns); scales and biases are float32, as yet unrounded.

    columns must be a multiple of `group`, one of GROUPS; `bits` is one of BITS.
    """
    shapes, dtypes = part_shapes(values.shape, bits, group), (np.uint32, np.float32, np.float32)
    codes, scales, biases = map(np.empty, shapes, dtypes)
    _quantise(codes, scales, biases, np.ascontiguousarray(values, np.float32), bits, group)
    return codes, scales, biases


@kernel
def _widen_halves(out, stored, form):
    """out (rows, columns) = the numbers that 16 bits each stand for, as float16 (form 1) or bfloat16 (2)."""
    for i in range(out.shape[0]):
        if form == 2:
            for j in range(out.shape[1]):
                out[i, j] = np.uint32(np.uint32(stored[i, j]) << np.uint32(16)).view(np.float32)
        else:
            for j in range(out.shape[1]):
                out[i, j] = number(stored[i, j], form)


@kernel
def _widen_codes(out, codes, scales, biases, form, bits, group, first):
    """out (rows, columns) = columns first, first + 1, ... of a quantised weight; `codes` are its bytes."""
    last = first + out.shape[1]
    for i in range(out.shape[0]):
        for g in range(first // group, (last + group - 1) // group):
            start, stop = max(first, g * group), min(last, (g + 1) * group)
            scale, bias = out.dtype.type(number(scales[i, g], form)), out.dtype.type(number(biases[i, g], form))
            row, packed = out[i, start - first:stop - first], codes[i, start * bits // 8:stop * bits // 8]
            if bits == 4:
                _widen_nibbles(row, packed, scale, bias)
            else:
                _widen_bytes(row, packed, scale, bias)


@kernel
def _widen_nibbles(out, packed, scale, bias):
    for p in range(len(packed)):
        out[2 * p] = scale * out.dtype.type(packed[p] & np.uint8(15)) + bias
        out[2 * p + 1] = scale * out.dtype.type(packed[p] >> np.uint8(4)) + bias


@kernel
def _widen_bytes(out, packed, scale, bias):
    for p in range(len(packed)):
        out[p] = scale * out.dtype.type(packed[p]) + bias


@kernel
def number(bits, form):
    """The float32 that the bits of a float32 (form 0), float16 (1) or bfloat16 (2) stand for."""
    word = np.uint32(bits)
    if form == 0:
        return word.view(np.float32)
    if form == 2:
        return np.uint32(word << np.uint32(16)).view(np.float32)
    moved = np.uint32((word & np.uint32(0x7FFF)) << np.uint32(13))           # exponent and mantissa in their places
    size = moved.view(np.float32) * np.float32(2.0 ** 112)                   # the exponent's bias is 127, not 15
    if moved >= np.uint32(0x7C00 << 13):                                     # infinity and NaN: the largest exponent
        size = np.uint32(moved | np.uint32(0x7F800000)).view(np.float32)
    return -size if word & np.uint32(0x8000) else size


@kernel
def _quantise(codes, scales, biases, values, bits, group):
    most, zero, words = np.float32(2 ** bits - 1), np.float32(0), group * bits // 32
    for i in range(values.shape[0]):
        for g in range(scales.shape[1]):
            part = values[i, g * group:(g + 1) * group]
            scale, bias = _scale_and_bias(part, most)
            scales[i, g], biases[i, g] = scale, bias
            for w in range(words):
                word = np.uint32(0)
                for k in range(32 // bits):
                    code = np.rint((part[w * (32 // bits) + k] - bias) / scale)
                    word |= np.uint32(np.uint32(min(max(code, zero), most)) << np.uint32(k * bits))
                codes[i, g * words + w] = word


@kernel
def _scale_and_bias(group, most):
    low, high = group[0], group[0]
    for value in group:
        low, high = min(low, value), max(high, value)
    scale = max((high - low) / most, SMALLEST_SCALE)
    scale, edge = (scale, low) if abs(low) > abs(high) else (-scale, high)
    whole = np.rint(edge / scale)
    return (edge / whole, edge) if whole != 0 else (scale, np.float32(0))
