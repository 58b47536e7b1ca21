"""Machine instructions that numba does not offer, for the compiled kernels."""

# Only part of numba is typed.
# mypy: allow-untyped-calls

import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

_Function = TypeVar("_Function", bound=Callable[..., object])


# The CPU that numba compiles for; an instruction that it lacks would abort the process.
_TRIPLE, CPU, _FEATURES = cpu_target.target_context.codegen().magic_tuple()
_HAS = {name[1:] for name in _FEATURES.split(",") if name.startswith("+")}
X86 = _TRIPLE.startswith("x86_64") and {"pclmul", "sse4.2"} <= _HAS
ARM = _TRIPLE.startswith("aarch64") and {"aes", "crc"} <= _HAS
# 128-bit lanes per vector. The number of vectors in flight hides the latency of the
# multiplication.
LANES = (
    4
    if X86 and {"vpclmulqdq", "avx512f"} <= _HAS
    else 2
    if X86 and {"vpclmulqdq", "avx2"} <= _HAS
    else 1
)
_IN_FLIGHT = 4 if LANES > 1 else 8
STRIDE_BYTES = 16 * LANES * _IN_FLIGHT
_CACHE_LINE_BYTES = 64
# Two pages: hardware prefetching stops at the end of a page. Mapped files fold 1.3
# times as fast with it.
_PREFETCH_BYTES = 8192
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_PAIR = ir.VectorType(_I64, 2)
ONES = np.uint64(0xFFFF_FFFF)
U64 = types.uint64


def jit(signature: object) -> Callable[[_Function], _Function]:
    """Compile a function at once for these types, without the GIL, and use numba's
    cache where it is available.
    """

    def compile_now(function: _Function) -> _Function:
        try:
            kernel = njit(signature, nogil=True, cache=True)(function)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError):
            # The cache is unusable: no writable folder, a full disk, or a file torn by
            # a crash. Compile each time instead.
            kernel = njit(signature, nogil=True)(function)
        return cast(_Function, kernel)

    return compile_now


# numba calls an intrinsic with the typing context and the argument types; it returns a
# signature and a code generator. Compiled code then calls it with the arguments only.
_intrinsic: Callable[[Callable[..., object]], Callable[..., np.uint64]] = intrinsic


_intrinsic_pair: Callable[[Callable[..., object]], Callable[..., tuple[np.uint64, np.uint64]]] = (
    intrinsic
)


@_intrinsic
def load64(typing_context: object, address: object) -> object:
    return U64(U64), lambda context, builder, signature, values: _load(builder, values[0], _I64)


@_intrinsic
def load32(typing_context: object, address: object) -> object:
    return U64(U64), lambda context, builder, signature, values: builder.zext(
        _load(builder, values[0], _I32), _I64
    )


@_intrinsic
def load8(typing_context: object, address: object) -> object:
    return U64(U64), lambda context, builder, signature, values: builder.zext(
        _load(builder, values[0], _I8), _I64
    )


@_intrinsic
def store64(typing_context: object, address: object, word: object) -> object:
    def generate(
        context: object, builder: ir.IRBuilder, signature: object, values: Sequence[ir.Value]
    ) -> ir.Value:
        builder.store(values[1], builder.inttoptr(values[0], _I64.as_pointer())).align = 1
        return values[1]

    return U64(U64, U64), generate


@_intrinsic
def copy_bytes(typing_context: object, to: object, source: object, length: object) -> object:
    """Copy so many bytes between two addresses whose memory does not overlap."""

    def generate(
        context: object, builder: ir.IRBuilder, signature: object, values: Sequence[ir.Value]
    ) -> ir.Value:
        to, source = (builder.inttoptr(value, _I8.as_pointer()) for value in values[:2])
        cgutils.raw_memcpy(builder, to, source, values[2], 1)
        return values[0]

    return U64(U64, U64, U64), generate


@_intrinsic
def leading_zeros(typing_context: object, word: object) -> object:
    return U64(U64), lambda context, builder, signature, values: builder.ctlz(
        values[0], ir.IntType(1)(0)
    )


@_intrinsic
def swap(typing_context: object, word: object) -> object:
    return U64(U64), lambda context, builder, signature, values: builder.bswap(values[0])


@_intrinsic
def crc32c_word(typing_context: object, register: object, word: object) -> object:
    """Add eight bytes to a CRC32C register with the processor's instruction."""

    def generate(
        context: object, builder: ir.IRBuilder, signature: object, values: Sequence[ir.Value]
    ) -> ir.Value:
        if X86:
            return _call(builder, "llvm.x86.sse42.crc32.64.64", _I64, values)
        narrow = [builder.trunc(values[0], _I32), values[1]]
        return builder.zext(_call(builder, "llvm.aarch64.crc32cx", _I32, narrow), _I64)

    return U64(U64, U64), generate


@_intrinsic_pair
def fold_strides(
    typing_context: object,
    address: object,
    strides: object,
    stride_low: object,
    stride_high: object,
    vector_low: object,
    vector_high: object,
    lane_low: object,
    lane_high: object,
) -> object:
    """Fold one stride of bytes or more, starting from the CRC's initial ones, to 128
    bits (low, high).
    """

    def generate(
        context: object, builder: ir.IRBuilder, signature: object, values: Sequence[ir.Value]
    ) -> ir.Value:
        start, count, *keys = values
        vector = ir.VectorType(_I64, 2 * LANES)
        by_stride = _splat(builder, keys[0:2], LANES)
        by_vector = _splat(builder, keys[2:4], LANES)

        def load_vectors(base: ir.Value) -> list[ir.Value]:
            return [
                _load(builder, builder.add(base, _I64(16 * LANES * i)), vector)
                for i in range(_IN_FLIGHT)
            ]

        first = load_vectors(start)
        first[0] = builder.xor(first[0], ir.Constant(vector, [0xFFFF_FFFF] + [0] * (2 * LANES - 1)))
        end = builder.add(start, builder.mul(count, _I64(STRIDE_BYTES)))
        before = builder.block
        head, body, done = (
            builder.append_basic_block(name) for name in ("fold_head", "fold_body", "fold_done")
        )
        builder.branch(head)

        builder.position_at_end(head)
        previous = builder.phi(_I64)
        sums = [builder.phi(vector) for _ in range(_IN_FLIGHT)]
        here = builder.add(previous, _I64(STRIDE_BYTES))
        builder.cbranch(builder.icmp_unsigned("<", here, end), body, done)

        builder.position_at_end(body)
        for i in range(0, STRIDE_BYTES, _CACHE_LINE_BYTES):
            _prefetch(builder, builder.add(here, _I64(_PREFETCH_BYTES + i)))
        further = [
            _shifted(builder, a, by_stride, b, LANES)
            for a, b in zip(sums, load_vectors(here), strict=True)
        ]
        builder.branch(head)
        for phi, initial, later in zip(
            [previous, *sums], [start, *first], [here, *further], strict=True
        ):
            phi.add_incoming(initial, before)
            phi.add_incoming(later, body)

        builder.position_at_end(done)
        total = sums[0]
        for following in sums[1:]:
            total = _shifted(builder, total, by_vector, following, LANES)
        lanes = [_lane(builder, total, i) for i in range(LANES)]
        by_lane, folded = _splat(builder, keys[4:6], 1), lanes[0]
        for following in lanes[1:]:
            folded = _shifted(builder, folded, by_lane, following, 1)
        halves = [builder.extract_element(folded, _I32(i)) for i in range(2)]
        return cgutils.pack_array(builder, halves)

    return types.UniTuple(U64, 2)(*[U64] * 8), generate


@_intrinsic_pair
def fold_lane(
    typing_context: object,
    low: object,
    high: object,
    next_low: object,
    next_high: object,
    lane_low: object,
    lane_high: object,
) -> object:
    """Shift 128 bits past the next 128 and add them to these: (low, high)."""

    def generate(
        context: object, builder: ir.IRBuilder, signature: object, values: Sequence[ir.Value]
    ) -> ir.Value:
        now, following, keys = (_splat(builder, values[i : i + 2], 1) for i in (0, 2, 4))
        folded = _shifted(builder, now, keys, following, 1)
        return cgutils.pack_array(
            builder, [builder.extract_element(folded, _I32(i)) for i in range(2)]
        )

    return types.UniTuple(U64, 2)(*[U64] * 6), generate


def _prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Prefetch a cache line; an invalid address is harmless."""
    pointer = _I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(prefetch, [builder.inttoptr(address, pointer), _I32(0), _I32(3), _I32(1)])


def _load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def _call(
    builder: ir.IRBuilder, name: str, result: ir.Type, values: Sequence[ir.Value]
) -> ir.Value:
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def _splat(builder: ir.IRBuilder, pair: Sequence[ir.Value], lanes: int) -> ir.Value:
    """A vector with the two words in every lane."""
    vector: ir.Value = ir.Constant(ir.VectorType(_I64, 2 * lanes), ir.Undefined)
    for i in range(2 * lanes):
        vector = builder.insert_element(vector, pair[i % 2], _I32(i))
    return vector


def _lane(builder: ir.IRBuilder, vector: ir.Value, index: int) -> ir.Value:
    return builder.shuffle_vector(
        vector, vector, ir.Constant(ir.VectorType(_I32, 2), [2 * index, 2 * index + 1])
    )


def _shifted(
    builder: ir.IRBuilder, value: ir.Value, keys: ir.Value, data: ir.Value, lanes: int
) -> ir.Value:
    """`value` shifted by the distance of `keys`, plus `data`, in every lane."""
    return builder.xor(
        builder.xor(*(_product(builder, value, keys, half, lanes) for half in (0, 1))), data
    )


def _product(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, half: int, lanes: int) -> ir.Value:
    """Carry-less product of the low or the high words of every lane."""
    if X86:
        name = "llvm.x86.pclmulqdq" + {1: "", 2: ".256", 4: ".512"}[lanes]
        return _call(builder, name, a.type, [a, b, _I8(0x11 * half)])
    words = [builder.extract_element(vector, _I32(half)) for vector in (a, b)]
    return builder.bitcast(
        _call(builder, "llvm.aarch64.neon.pmull64", ir.VectorType(_I8, 16), words), _PAIR
    )
