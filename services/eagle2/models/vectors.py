# mypy: disable-error-code="no-untyped-call,no-untyped-def,no-untyped-call"
"""The inner loop of the CPU kernels in explicit vectors: sums of weighted rows, one fused multiply-add after the other.

Left to the compiler, this loop keeps its sums in memory. Written in LLVM's terms they stay in registers, and the order
of every sum is what stands here: lane by lane, row by row.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

WIDTH = 64  # columns of one call: four vectors of sixteen
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
