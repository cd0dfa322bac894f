# mypy: disable-error-code="no-untyped-call,no-untyped-def"
"""Products of a few rows with packed weights, in explicit vectors and matrix tiles, for kernels that numba compiles.

A row's numbers come from the same instructions in the same order whatever rows are computed beside it, which is what
oneDNN promises for some counts of rows only. Two formats, each with its own way:

- float32: one fused multiply-add after the other along the inner dimension, 32 columns at a time.
- bfloat16 on a CPU with AMX: 16 rows times 32 columns in matrix tiles, 32 inner numbers an instruction.

Both read a weight once and in the order in which it lies in memory.
"""

from __future__ import annotations

import ctypes
import platform

import llvmlite.binding as llvm
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from eagle2.models.vectors import VECTOR, load, multiply_add, prefetch, rounded, splat, widened

COLUMNS = 32  # outputs of one block of weights
TILE_ROWS = 16
_AHEAD = 8192  # bytes of weights that are asked for before they are used: the processor alone looks less far
STEP = 32  # inner numbers that a matrix tile takes at once

_FLOAT, _BYTE, _INT = ir.FloatType(), ir.IntType(8), ir.IntType(64)
_NARROW = ir.VectorType(ir.IntType(16), 16)
# arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA): Linux gives a process the tile registers when it asks for them.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
# A tile configuration: palette 1, and for each of eight tiles 64 bytes a row and 16 rows.
_CONFIGURATION = bytes([1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [TILE_ROWS] * 8 + [0] * 8)


def has_matrix_tiles() -> bool:
    """Whether this process may use AMX for bfloat16; asks Linux for it."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    features = llvm.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def packed(weight: Tensor) -> Tensor:
    """(O, I) in blocks of 32 outputs, 1-D; O is filled up with zeros. bfloat16 wants I to be a multiple of 32.

    float32: (O/32, I, 32). bfloat16: (O/32, I/32, 2, 16, 16, 2), a tile being 16 pairs of inner numbers by 16 outputs.
    """
    outputs, inputs = weight.shape
    blocks = -(-outputs // COLUMNS)
    weight = torch.nn.functional.pad(weight, (0, 0, 0, blocks * COLUMNS - outputs))
    if weight.dtype == torch.float32:
        return weight.view(blocks, COLUMNS, inputs).transpose(1, 2).flatten()
    tiles = weight.view(blocks, 2, 16, inputs // STEP, 16, 2)
    return tiles.permute(0, 3, 1, 4, 2, 5).flatten()


def _pointer(context, builder, signature, arguments, index):
    return context.make_array(signature.args[index])(context, builder, arguments[index]).data


def _tile_call(builder, name, *arguments):
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


def _tile_product(two):
    """``out[r, c] = sum over i of x[row + r, i] * weights[..]`` for 16 rows, or for 32 when ``two``, by 32 columns.

    x (rows, I) bfloat16 bits, rows whole tiles; weights packed, of which the block begins at ``offset``; out (32, 32)
    float32.
    """

    @intrinsic
    def product(typing, x, row, weights, offset, out):  # noqa: ARG001  (the names are the signature)
        del typing

        def codegen(context, builder, signature, arguments):
            source = context.make_array(signature.args[0])(context, builder, arguments[0])
            inputs = cgutils.unpack_tuple(builder, source.shape)[1]
            byte = _BYTE.as_pointer()
            stride = builder.mul(inputs, _INT(2))
            rows = builder.bitcast(builder.gep(source.data, [builder.mul(arguments[1], inputs)]), byte)
            weights = _pointer(context, builder, signature, arguments, 2)
            block = builder.bitcast(builder.gep(weights, [arguments[3]]), byte)
            target = builder.bitcast(_pointer(context, builder, signature, arguments, 4), byte)
            sums = range(4 if two else 2)
            for tile in sums:
                _tile_call(builder, "tilezero", _BYTE(tile))
            with cgutils.for_range(builder, builder.udiv(inputs, _INT(STEP))) as loop:
                part = builder.gep(rows, [builder.mul(loop.index, _INT(2 * STEP))])
                tiles = builder.gep(block, [builder.mul(loop.index, _INT(2048))])
                for line in range(_AHEAD, _AHEAD + 2048, 64):
                    prefetch(builder, builder.gep(tiles, [_INT(line)]))
                _tile_call(builder, "tileloadd64", _BYTE(6), tiles, _INT(64))
                _tile_call(builder, "tileloadd64", _BYTE(7), builder.gep(tiles, [_INT(1024)]), _INT(64))
                _tile_call(builder, "tileloadd64", _BYTE(4), part, stride)
                _tile_call(builder, "tdpbf16ps", _BYTE(0), _BYTE(4), _BYTE(6))
                _tile_call(builder, "tdpbf16ps", _BYTE(1), _BYTE(4), _BYTE(7))
                if two:
                    below = builder.gep(part, [builder.mul(stride, _INT(TILE_ROWS))])
                    _tile_call(builder, "tileloadd64", _BYTE(5), below, stride)
                    _tile_call(builder, "tdpbf16ps", _BYTE(2), _BYTE(5), _BYTE(6))
                    _tile_call(builder, "tdpbf16ps", _BYTE(3), _BYTE(5), _BYTE(7))
            for tile in sums:
                place = (tile // 2 * TILE_ROWS * COLUMNS + tile % 2 * 16) * 4
                _tile_call(builder, "tilestored64", _BYTE(tile), builder.gep(target, [_INT(place)]), _INT(4 * COLUMNS))
            return context.get_dummy_value()

        return types.void(x, types.int64, weights, types.int64, out), codegen

    return product


tile_product = _tile_product(two=False)
tile_product_pair = _tile_product(two=True)


@intrinsic
def begin_tiles(typing, saved):
    """Configure this thread's tiles; ``saved`` (64,) uint8 gets what was configured before (oneDNN's, if any)."""
    del typing

    def codegen(context, builder, signature, arguments):
        before = builder.bitcast(_pointer(context, builder, signature, arguments, 0), _BYTE.as_pointer())
        _tile_call(builder, "sttilecfg", before)
        constant = cgutils.global_constant(
            builder, "tile_configuration", ir.Constant(ir.ArrayType(_BYTE, 64), bytearray(_CONFIGURATION))
        )
        _tile_call(builder, "ldtilecfg", builder.bitcast(constant, _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(saved), codegen


@intrinsic
def end_tiles(typing, saved):
    """Give the tiles back as ``begin_tiles`` found them."""
    del typing

    def codegen(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature, arguments, 0)
        _tile_call(builder, "ldtilecfg", builder.bitcast(pointer, _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(saved), codegen


def _row_product(count):
    """The same for ``count`` rows of float32: out[r, c] for c in 0..31."""

    @intrinsic
    def product(typing, x, row, weights, offset, out):  # noqa: ARG001  (the names are the signature)
        del typing

        def codegen(context, builder, signature, arguments):
            source = context.make_array(signature.args[0])(context, builder, arguments[0])
            inputs = cgutils.unpack_tuple(builder, source.shape)[1]
            first = builder.gep(source.data, [builder.mul(arguments[1], inputs)])
            weights = _pointer(context, builder, signature, arguments, 2)
            block = builder.gep(weights, [arguments[3]])
            target = _pointer(context, builder, signature, arguments, 4)
            rows = [builder.gep(first, [builder.mul(_INT(r), inputs)]) for r in range(count)]
            zero = ir.Constant(VECTOR, [0.0] * 16)
            sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(2)] for _ in range(count)]
            with cgutils.for_range(builder, inputs) as loop:
                line = builder.gep(block, [builder.mul(loop.index, _INT(COLUMNS))])
                halves = [load(builder, line, half) for half in (0, 16)]
                for r in range(count):
                    number = splat(builder, builder.load(builder.gep(rows[r], [loop.index])))
                    for half in range(2):
                        total = multiply_add(builder, number, halves[half], builder.load(sums[r][half]))
                        builder.store(total, sums[r][half])
            for r in range(count):
                for half in range(2):
                    place = builder.gep(target, [_INT(r * COLUMNS + half * 16)])
                    place = builder.bitcast(place, VECTOR.as_pointer())
                    builder.store(builder.load(sums[r][half]), place, align=4)
            return context.get_dummy_value()

        return types.void(x, types.int64, weights, types.int64, out), codegen

    return product


row_product_1 = _row_product(1)
row_product_2 = _row_product(2)
row_product_4 = _row_product(4)
row_product_8 = _row_product(8)
row_product_12 = _row_product(12)


def _finish(added):
    """``out[at:at+16] = sums[i, c:c+16] + biases[bias:bias+16]`` in the format of ``out``.

    When ``added``, what is there already is added to the rounded numbers, and the result is rounded again.

    sums (32, 32) and biases float32; out 2-D, at counted through it; sums and out may be the same array.
    """

    @intrinsic
    def finish(typing, sums, i, c, biases, bias, out, at):  # noqa: ARG001  (the names are the signature)
        del typing
        as_bits = out.dtype == types.uint16

        def codegen(context, builder, signature, arguments):
            place = builder.add(builder.mul(arguments[1], _INT(COLUMNS)), arguments[2])
            sums = builder.gep(_pointer(context, builder, signature, arguments, 0), [place])
            biases = builder.gep(_pointer(context, builder, signature, arguments, 3), [arguments[4]])
            target = builder.gep(_pointer(context, builder, signature, arguments, 5), [arguments[6]])
            kind = _NARROW if as_bits else VECTOR
            target = builder.bitcast(target, kind.as_pointer())
            result = builder.fadd(load(builder, sums, 0), load(builder, biases, 0))
            if added:
                before = builder.load(target, align=2 if as_bits else 4)
                if as_bits:
                    before, result = widened(builder, before), widened(builder, rounded(builder, result))
                result = builder.fadd(before, result)
            builder.store(rounded(builder, result) if as_bits else result, target, align=2 if as_bits else 4)
            return context.get_dummy_value()

        index = types.int64
        return types.void(sums, index, index, biases, index, out, index), codegen

    return finish


finish = _finish(added=False)
finish_added = _finish(added=True)


@intrinsic
def best_of_block(typing, sums, i, biases, bias, count, tops, places, at, first):  # noqa: ARG001
    """``tops[at]`` = the largest of ``sums[i, :count] + biases[bias:bias+count]``, NaN where one is NaN.

    ``places[at]`` = ``first`` + the lowest column that has it. sums (32, 32), biases and tops (N, blocks) float32,
    places (N, blocks) int32, ``at`` counted through both.
    """
    del typing

    def codegen(context, builder, signature, arguments):
        def place(index, offset):
            return builder.gep(_pointer(context, builder, signature, arguments, index), [offset])

        def word(number):
            return builder.trunc(number, ir.IntType(32))

        source, biases = place(0, builder.mul(arguments[1], _INT(COLUMNS))), place(2, arguments[3])
        counts = builder.icmp_signed("<", ir.Constant(wide, list(range(COLUMNS))), _spread(builder, word(arguments[4])))
        halves = [builder.fadd(load(builder, source, half), load(builder, biases, half)) for half in (0, 16)]
        both = builder.shuffle_vector(*halves, ir.Constant(wide, list(range(COLUMNS))))
        both = builder.select(counts, both, ir.Constant(floats, [float("-inf")] * COLUMNS))
        top = both
        for step in (16, 8, 4, 2, 1):
            order = ir.Constant(wide, [(lane + step) % COLUMNS for lane in range(COLUMNS)])
            other = builder.shuffle_vector(top, top, order)
            top = builder.select(builder.fcmp_ordered(">", other, top), other, top)
        top = builder.extract_element(top, ir.IntType(32)(0))
        one = builder.insert_element(ir.Constant(floats, ir.Undefined), top, ir.IntType(32)(0))
        tops = builder.shuffle_vector(one, one, ir.Constant(wide, [0] * COLUMNS))
        mask = builder.bitcast(builder.fcmp_ordered("==", both, tops), ir.IntType(32))
        lane = builder.cttz(mask, ir.IntType(1)(0))
        broken = builder.bitcast(builder.fcmp_unordered("uno", both, both), ir.IntType(32))
        broken = builder.icmp_unsigned("!=", broken, ir.IntType(32)(0))
        builder.store(builder.select(broken, _FLOAT(float("nan")), top), place(5, arguments[7]))
        builder.store(builder.add(word(arguments[8]), lane), place(6, arguments[7]))
        return context.get_dummy_value()

    floats, wide = ir.VectorType(_FLOAT, COLUMNS), ir.VectorType(ir.IntType(32), COLUMNS)
    index = types.int64
    return types.void(sums, index, biases, index, index, tops, places, index, index), codegen


def _spread(builder, value):
    wide = ir.VectorType(ir.IntType(32), COLUMNS)
    one = builder.insert_element(ir.Constant(wide, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(wide, [0] * COLUMNS))
