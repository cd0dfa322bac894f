# mypy: disable-error-code="no-untyped-call,no-untyped-def"
"""What needs exp in the CPU kernels, in explicit vectors: the weights of a softmax, and silu(gate) * up.

Every lane is computed alone, and the sums of a block's weights are halved in a fixed order.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from eagle2.models.vectors import LANES, VECTOR, load, multiply_add, rounded, splat, widened

_FLOAT, _INT = ir.FloatType(), ir.IntType(64)
_WORDS = ir.VectorType(ir.IntType(32), LANES)
EXP_LOW = -87.0  # below it exp is 0 in float32
LOG2E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
# Minimax polynomial of exp on [-ln2/2, ln2/2] (Cephes), 1 ulp or so.
POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def _all(number):
    return ir.Constant(VECTOR, [number] * LANES)


def _larger(builder, a, b):
    """b where it is the larger one, else a."""
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


def _exp(builder, x, fused):
    """exp of sixteen numbers in [-87, 88]; ``fused``: multiply-adds are rounded once."""

    def add_product(a, b, c):
        return multiply_add(builder, a, b, c) if fused else builder.fadd(builder.fmul(a, b), c)

    floor = cgutils.get_or_insert_function(builder.module, ir.FunctionType(VECTOR, [VECTOR]), "llvm.floor.v16f32")
    n = builder.call(floor, [add_product(x, _all(LOG2E), _all(0.5))])
    r = add_product(n, _all(-LN2_HIGH), x)
    r = add_product(n, _all(-LN2_LOW), r)
    p = _all(POLYNOMIAL[0])
    for number in POLYNOMIAL[1:]:
        p = add_product(p, r, _all(number))
    p = builder.fadd(add_product(p, builder.fmul(r, r), r), _all(1.0))
    exponent = builder.add(builder.fptosi(n, _WORDS), ir.Constant(_WORDS, [127] * LANES))
    power = builder.shl(exponent, ir.Constant(_WORDS, [23] * LANES))
    return builder.fmul(p, builder.bitcast(power, VECTOR))


def _weight(builder, x):
    """exp of differences to a maximum, 0 for small ones (and for what is no number)."""
    low = _all(EXP_LOW)
    weight = _exp(builder, _larger(builder, x, low), fused=True)
    return builder.select(builder.fcmp_ordered(">", x, low), weight, _all(0.0))


def _halved(builder, parts, combine):
    """Four vectors to one number, halves after halves: n with n + 32, n + 16, n + 8, ..., n + 1."""
    whole = combine(combine(parts[0], parts[2]), combine(parts[1], parts[3]))
    for step in (8, 4):
        whole = combine(whole, _moved(builder, whole, step))
    pairs = combine(whole, _moved(builder, whole, 1))
    first, second = (builder.extract_element(pairs, ir.IntType(32)(lane)) for lane in (0, 2))
    return combine(first, second)


def _moved(builder, vector, step):
    order = ir.Constant(_WORDS, [(lane + step) % LANES for lane in range(LANES)])
    return builder.shuffle_vector(vector, vector, order)


@intrinsic
def weigh(typing, scores, n, valid, scale, tops, totals, i):  # noqa: ARG001  (the names are the signature)
    """Scores n of (4, 64) become softmax weights, those from ``valid`` on 0; brings maximum and sum i on.

    tops, totals (N,) float32: running maxima and sums. Returns by what the earlier output is to be multiplied.
    """
    del typing

    def codegen(context, builder, signature, arguments):
        def place(index, offset):
            array = context.make_array(signature.args[index])(context, builder, arguments[index])
            return builder.gep(array.data, [offset])

        row = place(0, builder.mul(arguments[1], _INT(4 * LANES)))
        top_place, total_place = place(4, arguments[6]), place(5, arguments[6])
        valid = _splat_word(builder, builder.trunc(arguments[2], ir.IntType(32)))
        scale = splat(builder, arguments[3])
        scores = []
        for part in range(0, 4 * LANES, LANES):
            lanes = ir.Constant(_WORDS, [part + lane for lane in range(LANES)])
            counts = builder.icmp_signed("<", lanes, valid)
            scaled = builder.fmul(load(builder, row, part), scale)
            scores.append(builder.select(counts, scaled, _all(float("-inf"))))
        before = builder.load(top_place)
        top = _larger(builder, before, _halved(builder, scores, lambda a, b: _larger(builder, a, b)))
        tops = splat(builder, top)
        weights = [_weight(builder, builder.fsub(part, tops)) for part in scores]
        for part, weight in enumerate(weights):
            target = builder.gep(row, [_INT(part * LANES)])
            builder.store(weight, builder.bitcast(target, VECTOR.as_pointer()), align=4)
        total = _halved(builder, weights, builder.fadd)
        keep = _weight(builder, splat(builder, builder.fsub(before, top)))
        keep = builder.extract_element(keep, ir.IntType(32)(0))
        kind = ir.FunctionType(_FLOAT, [_FLOAT, _FLOAT, _FLOAT])
        fma = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.f32")
        builder.store(builder.call(fma, [builder.load(total_place), keep, total]), total_place)
        builder.store(top, top_place)
        return keep

    return types.float32(scores, types.int64, types.int64, types.float32, tops, totals, types.int64), codegen


def _splat_word(builder, value):
    one = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * LANES))


@intrinsic
def finish_gated(typing, sums, i, biases, bias, out, at):  # noqa: ARG001
    """``out[at:at+16] = silu(gate) * up``, gate being ``sums[i, :16] + biases[bias:bias+16]``, up the next 16.

    Both are rounded to the format of ``out``, uint16 (bfloat16 bits) or float32, before and after. sums (32, 32) and
    biases float32; out 2-D, ``at`` counted through it.
    """
    del typing
    as_bits = out.dtype == types.uint16

    def codegen(context, builder, signature, arguments):
        def place(index, offset):
            array = context.make_array(signature.args[index])(context, builder, arguments[index])
            return builder.gep(array.data, [offset])

        source, biases = place(0, builder.mul(arguments[1], _INT(32))), place(2, arguments[3])
        numbers = [builder.fadd(load(builder, source, part), load(builder, biases, part)) for part in (0, LANES)]
        if as_bits:
            numbers = [widened(builder, rounded(builder, number)) for number in numbers]
        value, up = numbers
        x = builder.fneg(value)
        x = _larger(builder, _all(EXP_LOW), x)
        # Not the other way round: what is no number must stay none.
        x = builder.select(builder.fcmp_ordered("<", x, _all(-EXP_LOW)), x, _all(-EXP_LOW))
        result = builder.fdiv(value, builder.fadd(_all(1.0), _exp(builder, x, fused=False)))
        result = builder.fmul(result, up)
        target = place(4, arguments[5])
        kind = ir.VectorType(ir.IntType(16), LANES) if as_bits else VECTOR
        result = rounded(builder, result) if as_bits else result
        builder.store(result, builder.bitcast(target, kind.as_pointer()), align=2 if as_bits else 4)
        return context.get_dummy_value()

    index = types.int64
    return types.void(sums, index, biases, index, out, index), codegen
