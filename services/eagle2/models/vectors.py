# mypy: disable-error-code="no-untyped-call,no-untyped-def,no-untyped-call"
"""The inner loops of the CPU kernels in explicit vectors: sums of weighted rows, and a tile of keys turned on its side.

Left to the compiler, the sums are kept in memory and the tile is moved number by number, which takes twenty times as
long as all the rest of a block. Written in LLVM's terms both stay in registers, and the order of every sum is what
stands here: lane by lane, row by row.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

WIDTH = 64  # columns of one call: four vectors of sixteen
LANES = 16  # of one vector, and rows and columns of a tile
_FLOAT, _INT = ir.FloatType(), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, 16)
_PARTS = range(0, WIDTH, 16)


def _accumulation(fresh):
    """``out[c:c+64] = start + sum of weights[i] * matrix[i, c:c+64] for i in 0..count-1`` with c the column.

    The start is 0 when ``fresh``, else scale * out[c:c+64]. weights (>= count,), matrix (>= count, columns) and out
    (columns,) are float32 and contiguous.
    """

    @intrinsic
    def accumulate(typing, weights, matrix, column, count, scale, out):  # noqa: ARG001  (the names are the signature)
        del typing

        def codegen(context, builder, signature, arguments):
            def array(index):
                return context.make_array(signature.args[index])(context, builder, arguments[index])

            columns = cgutils.unpack_tuple(builder, array(1).shape)[1]
            column, count, scale = arguments[2:5]
            weight_at = array(0).data
            first_row = builder.gep(array(1).data, [column])
            result = builder.gep(array(5).data, [column])
            sums = []
            for part in _PARTS:
                start = ir.Constant(_VECTOR, [0.0] * 16)
                if not fresh:
                    start = builder.fmul(_splat(builder, scale), _load(builder, result, part))
                sums.append(cgutils.alloca_once_value(builder, start))
            with cgutils.for_range(builder, count) as loop:
                weight = _splat(builder, builder.load(builder.gep(weight_at, [loop.index])))
                row = builder.gep(first_row, [builder.mul(loop.index, columns)])
                for part, total in zip(_PARTS, sums, strict=True):
                    product = _fused_multiply_add(builder, weight, _load(builder, row, part), builder.load(total))
                    builder.store(product, total)
            for part, total in zip(_PARTS, sums, strict=True):
                place = builder.bitcast(builder.gep(result, [_INT(part)]), _VECTOR.as_pointer())
                builder.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        return types.void(weights, matrix, types.int64, types.int64, types.float32, out), codegen

    return accumulate


@intrinsic
def transpose_tile(typing, pool, head, column, slots, first, last, keys, lane):  # noqa: ARG001
    """``keys[column + c, lane + i] = pool[slots[min(first + i, last)], head, column + c]`` for c and i in 0..15.

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
            rows.append(_load_row(builder, builder.gep(array(0).data, [row]), stored_as_bits))
        for c, vector in enumerate(_transposed(builder, rows)):
            place = builder.add(builder.mul(builder.add(column, _INT(c)), positions), lane)
            target = builder.bitcast(builder.gep(array(6).data, [place]), _VECTOR.as_pointer())
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
        builder.store(vector, builder.bitcast(builder.gep(target.data, [place]), _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    index = types.int64
    return types.void(pool, index, index, index, values, index), codegen


def _load_row(builder, pointer, stored_as_bits):
    if not stored_as_bits:
        return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)
    narrow, wide = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.IntType(32), LANES)
    bits = builder.load(builder.bitcast(pointer, narrow.as_pointer()), align=2)
    return builder.bitcast(builder.shl(builder.zext(bits, wide), ir.Constant(wide, [16] * LANES)), _VECTOR)


def _transposed(builder, rows):
    """Sixteen vectors of sixteen, rows and columns exchanged: halves, then quarters and so on change places."""
    rows = list(rows)
    kind = ir.VectorType(ir.IntType(32), LANES)
    for step in (8, 4, 2, 1):
        # Lane n of the upper result comes from the first vector, or from the second one ``step`` lanes before.
        upper = ir.Constant(kind, [n if n & step == 0 else LANES + n - step for n in range(LANES)])
        lower = ir.Constant(kind, [n + step if n & step == 0 else LANES + n for n in range(LANES)])
        for i in range(LANES):
            if i & step == 0:
                a, b = rows[i], rows[i + step]
                rows[i], rows[i + step] = builder.shuffle_vector(a, b, upper), builder.shuffle_vector(a, b, lower)
    return rows


def _load(builder, pointer, part):
    return builder.load(builder.bitcast(builder.gep(pointer, [_INT(part)]), _VECTOR.as_pointer()), align=4)


def _splat(builder, value):
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16))


def _fused_multiply_add(builder, a, b, c):
    kind = ir.FunctionType(_VECTOR, [_VECTOR, _VECTOR, _VECTOR])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")
    return builder.call(function, [a, b, c])


sum_rows = _accumulation(fresh=True)
add_rows = _accumulation(fresh=False)
