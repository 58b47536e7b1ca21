"""Compiled checksum kernels: whole chunks and whole trees in one call that holds no
GIL.

Importing this module compiles (or loads from numba's cache) everything, so only
merkle.checksum imports it, on first use; where the machine cannot run the kernels the
import fails with an ImportError that says why.

A CRC is folded: carry-less multiplication moves the bytes seen so far past the bytes to
come, 128 to 512 bits at a time in several independent accumulators, which keeps up with
memory where the crc32 instruction is bound by its latency, and works alike for both
polynomials. crcmod makes the byte tables and the folding keys, which are shifts of one
bit by zero bytes. The last bytes of a window go through the tables, or through the
crc32 instruction where there is one for the polynomial; in trees every word feeds the
next, so there that instruction itself is best.
"""

# Only part of numba is typed.
# mypy: allow-untyped-calls

import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

import crcmod
import numpy as np
from llvmlite import ir
from numba import config, njit
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Function = TypeVar("_Function", bound=Callable[..., object])

# What the code that numba makes will be built for; asking for an instruction beyond it
# would abort the process.
_TRIPLE, _CPU, _FEATURES = cpu_target.target_context.codegen().magic_tuple()
_HAS = {name[1:] for name in _FEATURES.split(",") if name.startswith("+")}
_X86 = _TRIPLE.startswith("x86_64") and {"pclmul", "sse4.2"} <= _HAS
_ARM = _TRIPLE.startswith("aarch64") and {"aes", "crc"} <= _HAS

# numba puts its options into this module when it is loaded, where mypy cannot see them.
if config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("numba's compiler is switched off (NUMBA_DISABLE_JIT)")
if sys.byteorder != "little" or not (_X86 or _ARM):
    raise ImportError(f"no carry-less multiplication and crc32 instructions on this CPU ({_CPU})")

# 128-bit lanes of one vector, and vectors in flight: enough to hide the latency of the
# multiplication.
_LANES = (
    4
    if _X86 and {"vpclmulqdq", "avx512f"} <= _HAS
    else 2
    if _X86 and {"vpclmulqdq", "avx2"} <= _HAS
    else 1
)
_IN_FLIGHT = 4 if _LANES > 1 else 8
_STRIDE_BYTES = 16 * _LANES * _IN_FLIGHT
_CACHE_LINE_BYTES = 64
# Two pages: processors by themselves stop reading ahead where a page ends. Mapped files
# fold 1.3 times as fast with it.
_AHEAD_BYTES = 8192

_CRC32_POLYNOMIAL, _CRC32C_POLYNOMIAL = 0x1_04C1_1DB7, 0x1_1EDC_6F41

ABOUT_WINDOWS = f"numba, carry-less multiplication, {128 * _LANES} bits"
ABOUT_BLOCKS = "numba, crc32 instruction"


@dataclass(frozen=True)
class _Polynomial:
    """What the folding kernel has to know of one CRC: shift keys, and tables for eight
    bytes at once.
    """

    keys: "NDArray[np.uint64]"
    tables: "NDArray[np.uint32]"


def _polynomial(poly: int) -> _Polynomial:
    table = np.array(crcmod.Crc(poly, initCrc=0, xorOut=0xFFFF_FFFF).table, np.uint32)
    tables = [table]
    while len(tables) < 8:
        tables.append((tables[-1] >> np.uint32(8)) ^ table[tables[-1] & np.uint32(0xFF)])

    def power(bits: int) -> int:
        # x^bits modulo the polynomial; bit-reversed, so that 1 is the top bit, and
        # times x as the product wants it.
        register = 0x8000_0000
        for _ in range(bits // 8):
            register = (register >> 8) ^ int(table[register & 0xFF])
        return register << 1

    distances = (8 * _STRIDE_BYTES, 128 * _LANES, 128)
    keys = [power(bits + half) for bits in distances for half in (32, -32)]
    return _Polynomial(np.array(keys, np.uint64), np.array(tables))


_CRC32 = _polynomial(_CRC32_POLYNOMIAL)
_CRC32C = _polynomial(_CRC32C_POLYNOMIAL)


def crc32_windows(view: memoryview, bytes_per_checksum: int) -> bytes:
    """The CRC32s of all windows, four bytes big-endian each, joined; `view` holds at
    least one byte.
    """
    return _all_windows(view, bytes_per_checksum, _CRC32)


def crc32c_windows(view: memoryview, bytes_per_checksum: int) -> bytes:
    """The same by CRC32C."""
    return _all_windows(view, bytes_per_checksum, _CRC32C)


def crc32c_ranges(view: memoryview, starts: "NDArray[np.int64]") -> "NDArray[np.int64]":
    """The CRC32C of every `view[starts[i]:starts[i + 1]]`; asserts that `starts`
    ascends and stays inside `view`.
    """
    out = np.empty(starts.size - 1, np.int64)
    _ranges(_read_only(view), starts, _CRC32C.keys, _CRC32C.tables, True, out)
    return out


def blocks(
    block_ids: "NDArray[np.int64]",
    chunk_starts: "NDArray[np.int64]",
    chunk_checksums: "NDArray[np.int64]",
) -> "NDArray[np.int64]":
    """The checksum of every block from its ID and its chunks' checksums; asserts that
    `chunk_starts` fits both.
    """
    out = np.empty(block_ids.size, np.int64)
    _blocks(block_ids, chunk_starts, chunk_checksums, out)
    return out


def encode_blocks(
    block_ids: "NDArray[np.int64]",
    block_checksums: "NDArray[np.int64]",
    block_deleted: "NDArray[np.bool_]",
    chunk_starts: "NDArray[np.int64]",
    chunk_offsets: "NDArray[np.int64]",
    chunk_lengths: "NDArray[np.int64]",
    chunk_checksums: "NDArray[np.int64]",
    chunk_matches: "NDArray[np.bool_]",
) -> bytes:
    """The `blockMerkleTree` fields of a tree as Ozone writes them; asserts that the
    columns fit each other.
    """
    # Every tag, bool, length and varint at its longest, and some more, which `put` may
    # write to.
    out = np.empty(40 * (block_ids.size + chunk_offsets.size), np.uint8)
    length_bytes = _encode(
        np.ascontiguousarray(block_ids, np.int64),
        np.ascontiguousarray(block_checksums, np.int64),
        np.ascontiguousarray(block_deleted, np.bool_),
        np.ascontiguousarray(chunk_starts, np.int64),
        np.ascontiguousarray(chunk_offsets, np.int64),
        np.ascontiguousarray(chunk_lengths, np.int64),
        np.ascontiguousarray(chunk_checksums, np.int64),
        np.ascontiguousarray(chunk_matches, np.bool_),
        out,
    )
    return out[:length_bytes].tobytes()


def _all_windows(view: memoryview, bytes_per_checksum: int, polynomial: _Polynomial) -> bytes:
    out = np.empty(-(-view.nbytes // bytes_per_checksum), np.uint32)
    _windows(
        _read_only(view),
        np.uint64(bytes_per_checksum),
        polynomial.keys,
        polynomial.tables,
        polynomial is _CRC32C,
        out,
    )
    return out.tobytes()


def _read_only(view: memoryview) -> "NDArray[np.uint8]":
    """The bytes as the one type of array that the kernels are compiled for."""
    data = np.frombuffer(view, np.uint8)
    data.flags.writeable = False
    return data


_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_PAIR = ir.VectorType(_I64, 2)
ONES = np.uint64(0xFFFF_FFFF)
_BYTE = np.uint64(0xFF)
_0, _1, _2, _4, _6, _7, _8, _9, _16, _32, _49, _64 = map(
    np.uint64, (0, 1, 2, 4, 6, 7, 8, 9, 16, 32, 49, 64)
)
# The lower parts of one word, of its halves and of its quarters.
_28_BITS, _14_BITS, _7_BITS = map(np.uint64, (0xFFF_FFFF, 0x3FFF_0000_3FFF, 0x7F_007F_007F_007F))
_7F, _80, _GOING_ON = np.uint64(0x7F), np.uint64(0x80), np.uint64(0x8080_8080_8080_8080)
# Tags of a tree file: fields 1 to 4, the middle two also as messages.
TAG_1, TAG_2, TAG_2_MESSAGE, TAG_3, TAG_3_MESSAGE, TAG_4 = map(
    np.uint64, (0x08, 0x10, 0x12, 0x18, 0x1A, 0x20)
)
_STRIDE = np.uint64(_STRIDE_BYTES)
_U64 = types.uint64
_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_KEYS, _WORDS = types.Array(_U64, 1, "C"), types.Array(types.int64, 1, "C")
# What is only read may be another library's memory, which it lends without leave to
# write.
_IN_WORDS, _IN_FLAGS = (
    types.Array(types.int64, 1, "C", readonly=True),
    types.Array(types.boolean, 1, "C", readonly=True),
)
_TABLES = types.Array(types.uint32, 2, "C")
_OUT = types.Array(types.uint8, 1, "C")


def jit(signature: object) -> Callable[[_Function], _Function]:
    """Compile now, for these types, without the GIL; kept in numba's cache where there
    is one.
    """

    def compiled(function: _Function) -> _Function:
        try:
            kernel = njit(signature, nogil=True, cache=True)(function)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError):
            # No folder to write to, a full disk, or a cache file torn by a crash:
            # compile each time instead.
            kernel = njit(signature, nogil=True)(function)
        return cast(_Function, kernel)

    return compiled


# numba gives an intrinsic the typing context and the argument types, and wants a
# signature and a code generator back; compiled code then calls it with the arguments
# alone.
_emitted: Callable[[Callable[..., object]], Callable[..., np.uint64]] = intrinsic
_emitted_pair: Callable[[Callable[..., object]], Callable[..., tuple[np.uint64, np.uint64]]] = (
    intrinsic
)


@_emitted
def _load64(typing_context: object, address: object) -> object:
    return _U64(_U64), lambda context, builder, signature, values: _load(builder, values[0], _I64)


@_emitted
def _load8(typing_context: object, address: object) -> object:
    return _U64(_U64), lambda context, builder, signature, values: builder.zext(
        _load(builder, values[0], _I8), _I64
    )


@_emitted
def store64(typing_context: object, address: object, word: object) -> object:
    def generate(
        context: object, builder: ir.IRBuilder, signature: object, values: Sequence[ir.Value]
    ) -> ir.Value:
        builder.store(values[1], builder.inttoptr(values[0], _I64.as_pointer())).align = 1
        return values[1]

    return _U64(_U64, _U64), generate


@_emitted
def _leading_zeros(typing_context: object, word: object) -> object:
    return _U64(_U64), lambda context, builder, signature, values: builder.ctlz(
        values[0], ir.IntType(1)(0)
    )


@_emitted
def swap(typing_context: object, word: object) -> object:
    return _U64(_U64), lambda context, builder, signature, values: builder.bswap(values[0])


@_emitted
def crc32c_word(typing_context: object, register: object, word: object) -> object:
    """Eight bytes into a CRC32C register by the processor's own instruction."""

    def generate(
        context: object, builder: ir.IRBuilder, signature: object, values: Sequence[ir.Value]
    ) -> ir.Value:
        if _X86:
            return _call(builder, "llvm.x86.sse42.crc32.64.64", _I64, values)
        narrow = [builder.trunc(values[0], _I32), values[1]]
        return builder.zext(_call(builder, "llvm.aarch64.crc32cx", _I32, narrow), _I64)

    return _U64(_U64, _U64), generate


@_emitted_pair
def _fold_strides(
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
    """At least one stride of bytes, started with the CRC's initial ones, folded into
    128 bits (low, high).
    """

    def generate(
        context: object, builder: ir.IRBuilder, signature: object, values: Sequence[ir.Value]
    ) -> ir.Value:
        start, count, *keys = values
        vector = ir.VectorType(_I64, 2 * _LANES)
        by_stride, by_vector = (
            _splat(builder, keys[0:2], _LANES),
            _splat(builder, keys[2:4], _LANES),
        )

        def loaded(base: ir.Value) -> list[ir.Value]:
            return [
                _load(builder, builder.add(base, _I64(16 * _LANES * i)), vector)
                for i in range(_IN_FLIGHT)
            ]

        first = loaded(start)
        first[0] = builder.xor(
            first[0], ir.Constant(vector, [0xFFFF_FFFF] + [0] * (2 * _LANES - 1))
        )
        end = builder.add(start, builder.mul(count, _I64(_STRIDE_BYTES)))
        before = builder.block
        head, body, done = (
            builder.append_basic_block(name) for name in ("fold_head", "fold_body", "fold_done")
        )
        builder.branch(head)

        builder.position_at_end(head)
        previous = builder.phi(_I64)
        sums = [builder.phi(vector) for _ in range(_IN_FLIGHT)]
        here = builder.add(previous, _I64(_STRIDE_BYTES))
        builder.cbranch(builder.icmp_unsigned("<", here, end), body, done)

        builder.position_at_end(body)
        for i in range(0, _STRIDE_BYTES, _CACHE_LINE_BYTES):
            _prefetch(builder, builder.add(here, _I64(_AHEAD_BYTES + i)))
        further = [
            _shifted(builder, a, by_stride, b, _LANES)
            for a, b in zip(sums, loaded(here), strict=True)
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
            total = _shifted(builder, total, by_vector, following, _LANES)
        lanes = [_lane(builder, total, i) for i in range(_LANES)]
        by_lane, folded = _splat(builder, keys[4:6], 1), lanes[0]
        for following in lanes[1:]:
            folded = _shifted(builder, folded, by_lane, following, 1)
        return cgutils.pack_array(
            builder, [builder.extract_element(folded, _I32(i)) for i in range(2)]
        )

    return types.UniTuple(_U64, 2)(*[_U64] * 8), generate


@_emitted_pair
def _fold_lane(
    typing_context: object,
    low: object,
    high: object,
    next_low: object,
    next_high: object,
    lane_low: object,
    lane_high: object,
) -> object:
    """128 bits moved past the next 128 and added to them: (low, high)."""

    def generate(
        context: object, builder: ir.IRBuilder, signature: object, values: Sequence[ir.Value]
    ) -> ir.Value:
        now, following, keys = (_splat(builder, values[i : i + 2], 1) for i in (0, 2, 4))
        folded = _shifted(builder, now, keys, following, 1)
        return cgutils.pack_array(
            builder, [builder.extract_element(folded, _I32(i)) for i in range(2)]
        )

    return types.UniTuple(_U64, 2)(*[_U64] * 6), generate


def _prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for a line to be read and kept; an address that is not there is no error."""
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
    """The two words in every lane of a vector."""
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
    """`value` moved past the distance of `keys`, plus `data`, in every lane."""
    return builder.xor(
        builder.xor(*(_product(builder, value, keys, half, lanes) for half in (0, 1))), data
    )


def _product(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, half: int, lanes: int) -> ir.Value:
    """Carry-less product of the low or the high words of every lane."""
    if _X86:
        name = "llvm.x86.pclmulqdq" + {1: "", 2: ".256", 4: ".512"}[lanes]
        return _call(builder, name, a.type, [a, b, _I8(0x11 * half)])
    words = [builder.extract_element(vector, _I32(half)) for vector in (a, b)]
    return builder.bitcast(
        _call(builder, "llvm.aarch64.neon.pmull64", ir.VectorType(_I8, 16), words), _PAIR
    )


@jit(_U64(_U64, _U64, _TABLES, types.boolean))
def _word(
    register: np.uint64, word: np.uint64, tables: "NDArray[np.uint32]", by_instruction: bool
) -> np.uint64:
    """Eight bytes into a register."""
    if by_instruction:
        return crc32c_word(register, word)
    x = register ^ word
    y = _0
    for i in range(8):
        y ^= np.uint64(tables[7 - i, x & _BYTE])
        x >>= _8
    return y


@jit(_U64(_U64, _U64, _KEYS, _TABLES, types.boolean))
def _crc(
    address: np.uint64,
    length_bytes: np.uint64,
    keys: "NDArray[np.uint64]",
    tables: "NDArray[np.uint32]",
    by_instruction: bool,
) -> np.uint64:
    """The CRC of the bytes at an address."""
    register = ONES
    if length_bytes >= _16:
        if length_bytes >= _STRIDE:
            strides = length_bytes // _STRIDE
            low, high = _fold_strides(
                address, strides, keys[0], keys[1], keys[2], keys[3], keys[4], keys[5]
            )
            address += strides * _STRIDE
            length_bytes -= strides * _STRIDE
        else:
            low, high = _load64(address) ^ ONES, _load64(address + _8)
            address += _16
            length_bytes -= _16
        while length_bytes >= _16:
            low, high = _fold_lane(
                low, high, _load64(address), _load64(address + _8), keys[4], keys[5]
            )
            address += _16
            length_bytes -= _16
        register = _word(_word(_0, low, tables, by_instruction), high, tables, by_instruction)
    if length_bytes >= _8:
        register = _word(register, _load64(address), tables, by_instruction)
        address += _8
        length_bytes -= _8
    while length_bytes > _0:
        register = np.uint64(tables[0, (register ^ _load8(address)) & _BYTE]) ^ (register >> _8)
        address += _1
        length_bytes -= _1
    return register ^ ONES


@jit(types.void(_BYTES, _U64, _KEYS, _TABLES, types.boolean, types.Array(types.uint32, 1, "C")))
def _windows(
    data: "NDArray[np.uint8]",
    window_bytes: np.uint64,
    keys: "NDArray[np.uint64]",
    tables: "NDArray[np.uint32]",
    by_instruction: bool,
    out: "NDArray[np.uint32]",
) -> None:
    address, length_bytes = np.uint64(data.ctypes.data), np.uint64(data.size)
    for i in range(out.size):
        here = min(window_bytes, length_bytes)
        # Swapped so that the bytes of `out` are big-endian.
        out[i] = np.uint32(swap(_crc(address, here, keys, tables, by_instruction)) >> _32)
        address += here
        length_bytes -= here


@jit(types.void(_BYTES, _IN_WORDS, _KEYS, _TABLES, types.boolean, _WORDS))
def _ranges(
    data: "NDArray[np.uint8]",
    starts: "NDArray[np.int64]",
    keys: "NDArray[np.uint64]",
    tables: "NDArray[np.uint32]",
    by_instruction: bool,
    out: "NDArray[np.int64]",
) -> None:
    address = np.uint64(data.ctypes.data)
    for i in range(out.size):
        assert 0 <= starts[i] <= starts[i + 1] <= data.size
        here = np.uint64(starts[i])
        out[i] = np.int64(
            _crc(address + here, np.uint64(starts[i + 1]) - here, keys, tables, by_instruction)
        )


@jit(types.void(_IN_WORDS, _IN_WORDS, _IN_WORDS, _WORDS))
def _blocks(
    block_ids: "NDArray[np.int64]",
    chunk_starts: "NDArray[np.int64]",
    chunk_checksums: "NDArray[np.int64]",
    out: "NDArray[np.int64]",
) -> None:
    assert chunk_starts.size == out.size + 1
    for i in range(out.size):
        assert 0 <= chunk_starts[i] <= chunk_starts[i + 1] <= chunk_checksums.size
        register = crc32c_word(ONES, swap(np.uint64(block_ids[i])))
        for j in range(chunk_starts[i], chunk_starts[i + 1]):
            register = crc32c_word(register, swap(np.uint64(chunk_checksums[j])))
        out[i] = np.int64(register ^ ONES)


@jit(types.int64(types.int64))
def varint_bytes(value: int | np.int64) -> int:
    """How many bytes a varint takes: a seventh of the bits that count, rounded up; nine
    64ths are that up to 64.
    """
    bits = _64 - _leading_zeros(np.uint64(value) | _1)
    return int((bits * _9 + _64) >> _6)


@jit(_U64(_U64, _U64, types.int64))
def put(address: np.uint64, tag: np.uint64, value: int | np.int64) -> np.uint64:
    """Write a tag and a varint to an address; return the one behind. Up to seven bytes
    behind are overwritten too.
    """
    word = np.uint64(value)
    if word >> _49 == _0:
        # Seven bytes at most: spread out (halves, quarters, sevens of bits), marked as
        # going on but for the last, and stored at once.
        spread = word & _28_BITS | (word & ~_28_BITS) << _4
        spread = spread & _14_BITS | (spread & ~_14_BITS) << _2
        spread = spread & _7_BITS | (spread & ~_7_BITS) << _1
        size = np.uint64(varint_bytes(value))
        spread |= _GOING_ON & ((_1 << (_8 * (size - _1))) - _1)
        store64(address, spread << _8 | tag)
        return address + size + _1
    store64(address, tag)
    address += _1
    while word > _7F:
        store64(address, word & _7F | _80)
        word >>= _7
        address += _1
    store64(address, word)
    return address + _1


@jit(_U64(_U64, _U64, types.int64))
def put_byte(address: np.uint64, tag: np.uint64, value: int | np.int64) -> np.uint64:
    """The same of a value below 128."""
    store64(address, np.uint64(value) << _8 | tag)
    return address + _2


@jit(
    types.int64(
        _IN_WORDS, _IN_WORDS, _IN_FLAGS, _IN_WORDS, _IN_WORDS, _IN_WORDS, _IN_WORDS, _IN_FLAGS, _OUT
    )
)
def _encode(
    block_ids: "NDArray[np.int64]",
    block_checksums: "NDArray[np.int64]",
    block_deleted: "NDArray[np.bool_]",
    chunk_starts: "NDArray[np.int64]",
    chunk_offsets: "NDArray[np.int64]",
    chunk_lengths: "NDArray[np.int64]",
    chunk_checksums: "NDArray[np.int64]",
    chunk_matches: "NDArray[np.bool_]",
    out: "NDArray[np.uint8]",
) -> int:
    """All blocks into `out`; the count of bytes written."""
    chunks = chunk_offsets.size
    assert block_ids.size == block_checksums.size == block_deleted.size == chunk_starts.size - 1
    assert chunks == chunk_lengths.size == chunk_checksums.size == chunk_matches.size
    sizes = np.empty(chunks, np.int64)
    start = np.uint64(out.ctypes.data)
    at = start
    for i in range(block_ids.size):
        first, last = chunk_starts[i], chunk_starts[i + 1]
        assert 0 <= first <= last <= chunks
        body = 4 + varint_bytes(block_ids[i]) + varint_bytes(block_checksums[i])
        for j in range(first, last):
            numbers = varint_bytes(chunk_offsets[j]) + varint_bytes(chunk_lengths[j])
            sizes[j] = 5 + numbers + varint_bytes(chunk_checksums[j])
            # At most 35 bytes, so that the length takes one; and a tag.
            body += 2 + sizes[j]
        at = put(at, TAG_2_MESSAGE, body)
        at = put(at, TAG_1, block_ids[i])
        at = put(at, TAG_2, block_checksums[i])
        for j in range(first, last):
            at = put_byte(at, TAG_3_MESSAGE, sizes[j])
            at = put(at, TAG_1, chunk_offsets[j])
            at = put(at, TAG_2, chunk_lengths[j])
            at = put(at, TAG_3, chunk_checksums[j])
            at = put_byte(at, TAG_4, int(chunk_matches[j]))
        at = put_byte(at, TAG_4, int(block_deleted[i]))
    return int(at - start)


def _prove() -> None:
    """Compare with crcmod once: a compiler that errs would report good data as
    corrupt.
    """
    data = bytes(range(256)) * 5
    for start, length_bytes in ((0, 1280), (3, 1000), (1, 27), (5, 9)):
        window = memoryview(data)[start : start + length_bytes]
        for poly, kernel in (
            (_CRC32_POLYNOMIAL, crc32_windows),
            (_CRC32C_POLYNOMIAL, crc32c_windows),
        ):
            expected = crcmod.Crc(poly, initCrc=0, xorOut=0xFFFF_FFFF).new(bytes(window)).digest()
            if kernel(window, length_bytes) != expected:
                raise ImportError("the compiled CRC kernels disagree with crcmod")
    word, starts = np.array([0x0102_0304_0506_0708]), np.array([0, 1])
    expected = crcmod.Crc(_CRC32C_POLYNOMIAL, initCrc=0, xorOut=0xFFFF_FFFF).new(
        word.astype(">i8").tobytes() * 2
    )
    if blocks(word, starts, word)[0] != expected.crcValue:
        raise ImportError("the compiled block kernel disagrees with crcmod")


_prove()
