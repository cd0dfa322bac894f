# mypy: disable-error-code="no-untyped-call,no-untyped-def,call-arg,unreachable"
"""How threads share the work of one kernel: pieces are taken in turn, and a phase is over when its pieces are done.

Nothing waits for a certain thread. One that was put aside by the system takes fewer pieces, one that comes late finds
phases that are over, and a thread alone does everything; so a busy machine costs little and cannot lock two threads.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

# A counter has a cache line of its own: columns 0 (pieces taken) and 8 (pieces done) of (phases, 16) int64.
WIDTH = 16
_TAKEN, _DONE = 0, 8
_SPINS = 2000  # looks at the counter before the processor is offered to others


def _counter(context, builder, signature, arguments):
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    place = builder.add(builder.mul(arguments[1], ir.IntType(64)(WIDTH)), arguments[2])
    return builder.gep(array.data, [place])


@intrinsic
def _add_one(typing, counters, phase, column):  # noqa: ARG001  (the names are the signature)
    """Add 1 and return what was there before; what was written before it is seen by who reads it."""
    del typing

    def codegen(context, builder, signature, arguments):
        one = ir.IntType(64)(1)
        return builder.atomic_rmw("add", _counter(context, builder, signature, arguments), one, "acq_rel")

    return types.int64(counters, types.int64, types.int64), codegen


@intrinsic
def _look(typing, counters, phase, column):  # noqa: ARG001
    del typing

    def codegen(context, builder, signature, arguments):
        return builder.load_atomic(_counter(context, builder, signature, arguments), "acquire", 8)

    return types.int64(counters, types.int64, types.int64), codegen


@intrinsic
def _offer_processor(typing):
    """The system's ``sched_yield``."""
    del typing

    def codegen(context, builder, signature, arguments):  # noqa: ARG001
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@njit(cache=True)
def take(counters, phase):
    """The number of a piece that nobody has taken yet; from the count of pieces on there is none left."""
    return _add_one(counters, phase, _TAKEN)


@njit(cache=True)
def put(counters, phase):
    """A piece is done."""
    _add_one(counters, phase, _DONE)


@njit(cache=True)
def wait(counters, phase, pieces):
    """Return when all pieces of the phase are done."""
    looks = 0
    while _look(counters, phase, _DONE) < pieces:
        looks += 1
        if looks > _SPINS:
            _offer_processor()
