# mypy: disable-error-code="no-untyped-call,no-untyped-def,no-untyped-call"
"""The inner loops of the CPU kernels in explicit vectors: sums of weighted rows, and a tile of keys turned on its side.

Left to the compiler, the sums are kept in memory and the tile is moved number by number, which takes twenty times as
long as all the rest of a block. Written in LLVM's terms both stay in registers, and the order of every sum is what
stands here: lane by lane, row by row.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, overload

WIDTH = 64  # columns of one call: four vectors of sixteen
LANES = 16  # of one vector, and rows and columns of a tile
_FLOAT, _INT = ir.FloatType(), ir.IntType(64)
VECTOR = ir.VectorType(_FLOAT, 16)
_WORDS, _NARROW = ir.VectorType(ir.IntType(32), 16), ir.VectorType(ir.IntType(16), 16)
_PARTS = range(0, WIDTH, 16)


def _accumulation(count, fresh):
    """``out[n, c:c+64] = start + sum of weights[n, i] * matrix[i, c:c+64] for i in 0..length-1`` with c the column, for
    ``count`` n from ``first`` of the weights and ``place`` of out on.

    The start is 0 when ``fresh``, else scales[n] * out[n, c:c+64]. weights (N, >= length), matrix (>= length, columns)
    and out (N, columns) are float32 and contiguous. Several n share what is read of the matrix, and fill the
    processor's pipeline; the order of each one's sum is the same as alone.
    """

    @intrinsic
    def accumulate(typing, weights, first, matrix, column, length, scales, out, place):  # noqa: ARG001
        del typing

        def codegen(context, builder, signature, arguments):
            def array(index):
                return context.make_array(signature.args[index])(context, builder, arguments[index])

            def line(index, number):
                width = cgutils.unpack_tuple(builder, array(index).shape)[1]
                return builder.gep(array(index).data, [builder.mul(number, width)])

            columns = cgutils.unpack_tuple(builder, array(2).shape)[1]
            column, length = arguments[3:5]
            first_row = builder.gep(array(2).data, [column])
            weights = [line(0, builder.add(arguments[1], _INT(n))) for n in range(count)]
            results = [builder.gep(line(6, builder.add(arguments[7], _INT(n))), [column]) for n in range(count)]
            sums = []
            for n, result in enumerate(results):
                for part in _PARTS:
                    start = ir.Constant(VECTOR, [0.0] * 16)
                    if not fresh:
                        scale = builder.load(builder.gep(array(5).data, [_INT(n)]))
                        start = builder.fmul(splat(builder, scale), load(builder, result, part))
                    sums.append(cgutils.alloca_once_value(builder, start))
            with cgutils.for_range(builder, length) as loop:
                row = builder.gep(first_row, [builder.mul(loop.index, columns)])
                parts = [load(builder, row, part) for part in _PARTS]
                for n, numbers in enumerate(weights):
                    weight = splat(builder, builder.load(builder.gep(numbers, [loop.index])))
                    for part, total in zip(parts, sums[n * len(_PARTS) :], strict=False):
                        builder.store(multiply_add(builder, weight, part, builder.load(total)), total)
            for n, result in enumerate(results):
                for part, total in zip(_PARTS, sums[n * len(_PARTS) :], strict=False):
                    target = builder.bitcast(builder.gep(result, [_INT(part)]), VECTOR.as_pointer())
                    builder.store(builder.load(total), target, align=4)
            return context.get_dummy_value()

        index = types.int64
        return types.void(weights, index, matrix, index, index, scales, out, index), codegen

    return accumulate


@intrinsic
def transpose_tile(typing, pool, head, column, slots, first, last, keys, lane):  # noqa: ARG001
    """``keys[column + c, lane + i] = pool[slots[min(first + i, last)], head, column + c]`` for i in 0..15.

    c: the columns of one tile, ``tile_columns(pool)``: sixteen words of each row, two numbers a word in bfloat16.
    pool (S, heads, D) uint16 (bfloat16 bits) or float32; slots int32; keys (D, positions) float32; all contiguous.
    """
    del typing
    stored_as_bits = pool.dtype == types.uint16

    def codegen(context, builder, signature, arguments):
        def array(index):
            return context.make_array(signature.args[index])(context, builder, arguments[index])

        heads, dim = cgutils.unpack_tuple(builder, array(0).shape)[1:]
        positions = cgutils.unpack_tuple(builder, array(6).shape)[1]
        head, column, first, last, lane = (arguments[i] for i in (1, 2, 4, 5, 7))
        rows = []
        for i in range(LANES):
            place = builder.add(first, _INT(i))
            place = builder.select(builder.icmp_signed("<", place, last), place, last)
            slot = builder.sext(builder.load(builder.gep(array(3).data, [place])), _INT)
            row = builder.add(builder.mul(builder.add(builder.mul(slot, heads), head), dim), column)
            words = builder.bitcast(builder.gep(array(0).data, [row]), _WORDS.as_pointer())
            rows.append(builder.load(words, align=2 if stored_as_bits else 4))
        for c, vector in enumerate(_columns(builder, _transposed(builder, rows), stored_as_bits)):
            place = builder.add(builder.mul(builder.add(column, _INT(c)), positions), lane)
            target = builder.bitcast(builder.gep(array(6).data, [place]), VECTOR.as_pointer())
            builder.store(vector, target, align=4)
        return context.get_dummy_value()

    index = types.int64
    return types.void(pool, index, index, slots, index, index, keys, index), codegen


@intrinsic
def copy_lanes(typing, pool, slot, head, column, values, row):  # noqa: ARG001
    """``values[row, column:column+16] = pool[slot, head, column:column+16]``, arrays as in ``transpose_tile``."""
    del typing
    stored_as_bits = pool.dtype == types.uint16

    def codegen(context, builder, signature, arguments):
        source, target = (context.make_array(signature.args[i])(context, builder, arguments[i]) for i in (0, 4))
        heads, dim = cgutils.unpack_tuple(builder, source.shape)[1:]
        slot, head, column, row = (arguments[i] for i in (1, 2, 3, 5))
        place = builder.add(builder.mul(builder.add(builder.mul(slot, heads), head), dim), column)
        vector = _load_row(builder, builder.gep(source.data, [place]), stored_as_bits)
        place = builder.add(builder.mul(row, cgutils.unpack_tuple(builder, target.shape)[1]), column)
        builder.store(vector, builder.bitcast(builder.gep(target.data, [place]), VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    index = types.int64
    return types.void(pool, index, index, index, values, index), codegen


def tile_columns(pool):
    """Columns that ``transpose_tile`` moves at once."""


@overload(tile_columns, inline="always")
def _tile_columns_overload(pool):
    columns = 2 * LANES if pool.dtype == types.uint16 else LANES
    return lambda pool: columns  # noqa: ARG005


def _columns(builder, words, stored_as_bits):
    """The float32 columns in vectors of words; a word of bfloat16 bits holds the even one below the odd one."""
    if not stored_as_bits:
        return [builder.bitcast(word, VECTOR) for word in words]
    columns = []
    for word in words:
        even = builder.shl(word, ir.Constant(_WORDS, [16] * LANES))
        odd = builder.and_(word, ir.Constant(_WORDS, [0xFFFF0000] * LANES))
        columns += [builder.bitcast(even, VECTOR), builder.bitcast(odd, VECTOR)]
    return columns


@intrinsic
def fetch_ahead(typing, pool, head, slots, first, count):  # noqa: ARG001
    """Ask for the rows of ``pool`` at slots[first : first + count] of one head, to be read soon; see ``copy_lanes``."""
    del typing
    size = 2 if pool.dtype == types.uint16 else 4

    def codegen(context, builder, signature, arguments):
        def array(index):
            return context.make_array(signature.args[index])(context, builder, arguments[index])

        heads, dim = cgutils.unpack_tuple(builder, array(0).shape)[1:]
        head, first, count = arguments[1], arguments[3], arguments[4]
        with cgutils.for_range(builder, count) as rows:
            slot = builder.sext(builder.load(builder.gep(array(2).data, [builder.add(first, rows.index)])), _INT)
            place = builder.mul(builder.add(builder.mul(slot, heads), head), dim)
            row = builder.bitcast(builder.gep(array(0).data, [place]), ir.IntType(8).as_pointer())
            bytes_ = builder.mul(dim, _INT(size))
            with cgutils.for_range(builder, builder.udiv(builder.add(bytes_, _INT(63)), _INT(64))) as lines:
                prefetch(builder, builder.gep(row, [builder.mul(lines.index, _INT(64))]))
        return context.get_dummy_value()

    index = types.int64
    return types.void(pool, index, slots, index, index), codegen


def _load_row(builder, pointer, stored_as_bits):
    if not stored_as_bits:
        return builder.load(builder.bitcast(pointer, VECTOR.as_pointer()), align=4)
    bits = builder.load(builder.bitcast(pointer, ir.VectorType(ir.IntType(16), LANES).as_pointer()), align=2)
    return widened(builder, bits)


def _transposed(builder, rows):
    """Sixteen vectors of sixteen, rows and columns exchanged: halves, then quarters and so on change places."""
    rows = list(rows)
    kind = _WORDS
    for step in (8, 4, 2, 1):
        # Lane n of the upper result comes from the first vector, or from the second one ``step`` lanes before.
        upper = ir.Constant(kind, [n if n & step == 0 else LANES + n - step for n in range(LANES)])
        lower = ir.Constant(kind, [n + step if n & step == 0 else LANES + n for n in range(LANES)])
        for i in range(LANES):
            if i & step == 0:
                a, b = rows[i], rows[i + step]
                rows[i], rows[i + step] = builder.shuffle_vector(a, b, upper), builder.shuffle_vector(a, b, lower)
    return rows


def load(builder, pointer, part):
    """Sixteen float32 from ``part`` numbers behind ``pointer`` on."""
    return builder.load(builder.bitcast(builder.gep(pointer, [_INT(part)]), VECTOR.as_pointer()), align=4)


def prefetch(builder, pointer):
    """Ask for a cache line to be brought near, into the second level."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(function, [pointer, word(0), word(2), word(1)])


def splat(builder, value):
    """One float32 in all lanes."""
    nothing = ir.Constant(VECTOR, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16))


def multiply_add(builder, a, b, c):
    """a * b + c, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR, VECTOR, VECTOR])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")
    return builder.call(function, [a, b, c])


def widened(builder, bits):
    """Sixteen bfloat16 bits as float32: they are the upper half."""
    words = ir.VectorType(ir.IntType(32), LANES)
    return builder.bitcast(builder.shl(builder.zext(bits, words), ir.Constant(words, [16] * LANES)), VECTOR)


def rounded(builder, vector):
    """Sixteen float32 as bfloat16 bits, to the nearest, ties to even; what is no number stays none."""

    def constant(number):
        return ir.Constant(_WORDS, [number] * 16)

    bits = builder.bitcast(vector, _WORDS)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    nearest = builder.lshr(builder.add(builder.add(bits, constant(0x7FFF)), odd), constant(16))
    broken = builder.fcmp_unordered("uno", vector, vector)
    return builder.trunc(builder.select(broken, constant(0x7FC0), nearest), _NARROW)


sum_rows_1, sum_rows_2, sum_rows_3, sum_rows_4 = (_accumulation(count, fresh=True) for count in (1, 2, 3, 4))
add_rows_1, add_rows_2, add_rows_3, add_rows_4 = (_accumulation(count, fresh=False) for count in (1, 2, 3, 4))
