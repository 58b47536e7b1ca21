"""The bytes of a comparison's messages.

Numbers are varints, at their shortest; keys of ranges leave out what they share with
the key before; names are columns (`proof.names_wire`), compressed. One message has one
encoding, but for the compression. Decoding checks every length before it reads, and
refuses what is left over: a peer can neither crash it nor make it take more memory than
a few messages.
"""

from collections.abc import Callable, Iterable, Sequence

from proof.index import AppliedPositions, EvidenceCounts, KeyRange, Position
from proof.item import ID_BYTES, KEY_HASH_BYTES, ROOT_DIGEST_BYTES, WORD_MASK
from proof.item_columns import ItemColumns
from proof.messages import (
    FIRST_SYMBOLS,
    JOB_BYTES,
    JOB_SYMBOLS_MAX,
    LISTED_MAX,
    MESSAGE_BYTES_MAX,
    NAMES_MAX,
    RANGES_MAX,
    SHORT_ID_BYTES,
    SYMBOLS_MAX,
    WINDOW_FANOUT,
    Answer,
    AnswerMessage,
    BitmapAnswer,
    KeysAnswer,
    KeysQuestion,
    ListQuestion,
    NamesAnswer,
    NamesQuestion,
    Question,
    QuestionMessage,
    RootAnswer,
    RootQuestion,
    SplitQuestion,
    SymbolsAnswer,
    SymbolsQuestion,
    UnequalAnswer,
    WindowsAnswer,
    WindowsQuestion,
)
from proof.names_wire import decode_items, decode_keys, encode_items, encode_keys
from proof.root import SetRoot
from proof.symbols import SYMBOL_BYTES
from runtime.errors import RemoteProtocolError

# The first byte of each message.
_FORMAT = 1
# Names compress well; this bounds what a small message can unfold to.
_NAMES_BYTES_MAX = 4 * MESSAGE_BYTES_MAX
# Stores take 1,024. A few bytes can stand for a key that shares all of the one before.
_KEY_BYTES_MAX = 1 << 12
_WORD_BITS = 64


def encode_question(message: QuestionMessage) -> bytes:
    """The bytes of a question, at most MESSAGE_BYTES_MAX."""
    writer = _Writer()
    writer.raw(bytes([_FORMAT, _QUESTIONS.index(type(message.question))]) + message.job)
    writer.number(message.number)
    writer.raw(message.profile)
    _write_question(writer, message.question)
    assert len(writer.out) <= MESSAGE_BYTES_MAX
    return bytes(writer.out)


def decode_question(data: bytes) -> QuestionMessage:
    """Read a question.

    Raises:
        RemoteProtocolError: these bytes are none.
    """
    reader = _opened(data)
    read = _QUESTION_READERS[reader.number(len(_QUESTION_READERS) - 1)]
    job, number, profile = reader.raw(JOB_BYTES), reader.number(), reader.raw(ID_BYTES)
    question = read(reader)
    reader.end()
    return QuestionMessage(job, number, profile, question)


def encode_answer(message: AnswerMessage) -> bytes:
    """The bytes of an answer, at most MESSAGE_BYTES_MAX."""
    writer = _Writer()
    writer.raw(bytes([_FORMAT, _ANSWERS.index(type(message.answer))]) + message.job)
    writer.number(message.number)
    _write_answer(writer, message.answer)
    assert len(writer.out) <= MESSAGE_BYTES_MAX
    return bytes(writer.out)


def decode_answer(data: bytes) -> AnswerMessage:
    """Read an answer.

    Raises:
        RemoteProtocolError: these bytes are none.
    """
    reader = _opened(data)
    read = _ANSWER_READERS[reader.number(len(_ANSWER_READERS) - 1)]
    job, number = reader.raw(JOB_BYTES), reader.number()
    answer = read(reader)
    reader.end()
    return AnswerMessage(job, number, answer)


class _Writer:
    def __init__(self) -> None:
        self.out = bytearray()

    def number(self, value: int) -> None:
        assert 0 <= value <= WORD_MASK
        while value > 0x7F:
            self.out.append(value & 0x7F | 0x80)
            value >>= 7
        self.out.append(value)

    def raw(self, data: bytes) -> None:
        self.out += data

    def sized(self, data: bytes) -> None:
        self.number(len(data))
        self.out += data

    def optional(self, value: int | None) -> None:
        self.number(0 if value is None else value + 1)

    def series(self, values: Iterable[int]) -> None:
        for value in values:
            self.number(value)

    def numbers(self, values: Sequence[int]) -> None:
        self.number(len(values))
        self.series(values)

    def key(self, before: bytes, key: bytes) -> None:
        shared = _shared_bytes(before, key)
        self.number(shared)
        self.sized(key[shared:])


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self, most: int = WORD_MASK) -> int:
        # Nearly all numbers take one byte.
        if self._at < len(self._data) and (first := self._data[self._at]) < 0x80:
            _expect(first <= most, "a number is above its limit")
            self._at += 1
            return first
        value = shift = 0
        while True:
            byte = self.raw(1)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            _expect(shift < _WORD_BITS, "a number does not end")
        _expect(byte != 0 or shift == 7, "a number is longer than it needs to be")
        _expect(value <= most, "a number is above its limit")
        return value

    def raw(self, length: int) -> bytes:
        _expect(length <= len(self._data) - self._at, "it is cut short")
        self._at += length
        return self._data[self._at - length : self._at]

    def sized(self, most: int) -> bytes:
        return self.raw(self.number(most))

    def text(self) -> str:
        return _text(self.sized(_KEY_BYTES_MAX))

    def optional(self) -> int | None:
        value = self.number()
        return value - 1 if value else None

    def key(self, before: bytes) -> bytes:
        shared = self.number(len(before))
        rest = self.sized(_KEY_BYTES_MAX - shared)
        key = before[:shared] + rest
        _expect(_shared_bytes(before, key) == shared, "a key repeats what it shares")
        return key

    def flag(self) -> bool:
        return bool(self.number(1))

    def rest(self) -> bytes:
        return self.raw(len(self._data) - self._at)

    def end(self) -> None:
        _expect(self._at == len(self._data), "bytes are left over")


def _expect(holds: bool, reason: str) -> None:
    if not holds:
        raise RemoteProtocolError(f"invalid message of a comparison: {reason}", reason=reason)


def _opened(data: bytes) -> _Reader:
    _expect(len(data) <= MESSAGE_BYTES_MAX, "it is too large")
    reader = _Reader(data)
    _expect(reader.raw(1)[0] == _FORMAT, "its format is unknown")
    return reader


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError("invalid message of a comparison: a key is not UTF-8") from error


def _shared_bytes(one: bytes, two: bytes) -> int:
    size = min(len(one), len(two))
    apart = int.from_bytes(one[:size], "big") ^ int.from_bytes(two[:size], "big")
    return size - (apart.bit_length() + 7) // 8


def _write_question(writer: _Writer, question: Question) -> None:
    match question:
        case RootQuestion(key_range, applied, digest):
            _write_ranges(writer, [key_range])
            _write_applied(writer, applied)
            writer.raw(digest)
        case SymbolsQuestion(at, ranges, first, last, salt):
            writer.number(at)
            _write_ranges(writer, ranges)
            writer.number(first)
            writer.number(last - first)
            writer.number(salt)
        case SplitQuestion(at, ranges, roots):
            writer.number(at)
            _write_ranges(writer, ranges)
            for count, total in roots:
                writer.number(count)
                writer.raw(total.to_bytes(8, "big"))
        case ListQuestion(at, key_range, short, skip):
            writer.number(at)
            _write_ranges(writer, [key_range])
            writer.number(skip)
            writer.sized(short)
        case NamesQuestion(at, hashes) | KeysQuestion(at, hashes):
            writer.number(at)
            writer.sized(hashes)
        case WindowsQuestion(key, version, level, index):
            writer.sized(key.encode())
            writer.sized(version.encode())
            writer.number(level)
            writer.number(index)


def _write_answer(writer: _Writer, answer: Answer) -> None:
    match answer:
        case RootAnswer(root, applied, position, evidence, symbols):
            _write_root(writer, root)
            _write_applied(writer, applied)
            writer.number(position)
            for count in (evidence.listed, evidence.recorded, evidence.read):
                writer.number(count)
            writer.optional(evidence.oldest_read_at_s)
            writer.number(bool(symbols))
            writer.raw(symbols)
        case SymbolsAnswer(symbols):
            writer.sized(symbols)
        case UnequalAnswer(counts):
            writer.number(len(counts))
            writer.raw(_pack_bits([count is not None for count in counts]))
            writer.series(count for count in counts if count is not None)
        case BitmapAnswer(present, extras, extras_count):
            writer.sized(present)
            writer.sized(extras)
            writer.number(extras_count)
        case NamesAnswer(answered, items):
            writer.number(answered)
            writer.number(len(items))
            writer.raw(encode_items(ItemColumns.of(items)))
        case KeysAnswer(answered, names):
            writer.number(answered)
            writer.number(len(names))
            writer.raw(encode_keys(names))
        case WindowsAnswer(checksums):
            writer.numbers(checksums)


def _read_root_question(reader: _Reader) -> RootQuestion:
    ranges = _read_ranges(reader)
    _expect(len(ranges) == 1, "a root is of one range")
    return RootQuestion(ranges[0], _read_applied(reader), reader.raw(ROOT_DIGEST_BYTES))


def _read_symbols_question(reader: _Reader) -> SymbolsQuestion:
    at, ranges = Position(reader.number()), _read_ranges(reader)
    first, size = reader.number(JOB_SYMBOLS_MAX), reader.number(SYMBOLS_MAX)
    _expect(first + size <= JOB_SYMBOLS_MAX, "it asks for too many symbols")
    return SymbolsQuestion(at, ranges, first, first + size, reader.number())


def _read_split_question(reader: _Reader) -> SplitQuestion:
    at, ranges = Position(reader.number()), _read_ranges(reader)
    roots = tuple((reader.number(), int.from_bytes(reader.raw(8), "big")) for _ in ranges)
    return SplitQuestion(at, ranges, roots)


def _read_list_question(reader: _Reader) -> ListQuestion:
    at, ranges, skip = Position(reader.number()), _read_ranges(reader), reader.number()
    _expect(len(ranges) == 1, "a list is of one range")
    short = _multiple(reader.sized(LISTED_MAX * SHORT_ID_BYTES), SHORT_ID_BYTES)
    return ListQuestion(at, ranges[0], short, skip)


def _read_names_question(reader: _Reader) -> NamesQuestion:
    at = Position(reader.number())
    return NamesQuestion(at, _multiple(reader.sized(NAMES_MAX * KEY_HASH_BYTES), KEY_HASH_BYTES))


def _read_keys_question(reader: _Reader) -> KeysQuestion:
    asked = _read_names_question(reader)
    return KeysQuestion(asked.at, asked.key_hashes)


def _read_windows_question(reader: _Reader) -> WindowsQuestion:
    return WindowsQuestion(reader.text(), reader.text(), reader.number(), reader.number())


def _read_root_answer(reader: _Reader) -> RootAnswer:
    root, applied = _read_root(reader), _read_applied(reader)
    position = Position(reader.number())
    evidence = EvidenceCounts(reader.number(), reader.number(), reader.number(), reader.optional())
    symbols = reader.raw(FIRST_SYMBOLS * SYMBOL_BYTES) if reader.flag() else b""
    return RootAnswer(root, applied, position, evidence, symbols)


def _read_symbols_answer(reader: _Reader) -> SymbolsAnswer:
    return SymbolsAnswer(_multiple(reader.sized(SYMBOLS_MAX * SYMBOL_BYTES), SYMBOL_BYTES))


def _read_unequal_answer(reader: _Reader) -> UnequalAnswer:
    differs = _read_bits(reader, reader.number(RANGES_MAX))
    return UnequalAnswer(tuple(reader.number() if one else None for one in differs))


def _read_bitmap_answer(reader: _Reader) -> BitmapAnswer:
    present = reader.sized(LISTED_MAX // 8)
    extras = _multiple(reader.sized(MESSAGE_BYTES_MAX), ID_BYTES)
    return BitmapAnswer(present, extras, reader.number())


def _read_names_answer(reader: _Reader) -> NamesAnswer:
    answered, count = reader.number(NAMES_MAX), reader.number(2 * NAMES_MAX)
    items = decode_items(reader.rest(), count, unfolded_max=_NAMES_BYTES_MAX)
    return NamesAnswer(answered, items)


def _read_keys_answer(reader: _Reader) -> KeysAnswer:
    answered, count = reader.number(NAMES_MAX), reader.number(2 * NAMES_MAX)
    return KeysAnswer(answered, decode_keys(reader.rest(), count, unfolded_max=_NAMES_BYTES_MAX))


def _read_windows_answer(reader: _Reader) -> WindowsAnswer:
    return WindowsAnswer(tuple(reader.number() for _ in range(reader.number(WINDOW_FANOUT))))


def _multiple(data: bytes, size: int) -> bytes:
    _expect(len(data) % size == 0, f"a length is no multiple of {size}")
    return data


def _write_root(writer: _Writer, root: SetRoot) -> None:
    writer.number(root.count)
    writer.raw(root.total.to_bytes(ID_BYTES, "big"))


def _read_root(reader: _Reader) -> SetRoot:
    return SetRoot(reader.number(), int.from_bytes(reader.raw(ID_BYTES), "big"))


def _write_applied(writer: _Writer, applied: AppliedPositions | None) -> None:
    writer.number(applied is not None)
    if applied is not None:
        through, listed = applied.through, applied.listed_through
        writer.number(through)
        writer.optional(None if listed is None else listed - through)
        before = [through, *applied.above]
        writer.numbers([b - a - 1 for a, b in zip(before, applied.above, strict=False)])


def _read_applied(reader: _Reader) -> AppliedPositions | None:
    if not reader.flag():
        return None
    through, listed = reader.number(), reader.optional()
    above, last = list[Position](), through
    for _ in range(reader.number(MESSAGE_BYTES_MAX)):
        last += reader.number() + 1
        above.append(Position(last))
    return AppliedPositions(
        Position(through),
        tuple(above),
        None if listed is None else Position(through + listed),
    )


def _write_ranges(writer: _Writer, ranges: Sequence[KeyRange]) -> None:
    """Bits tell which ranges begin where the one before ends; then the other bounds."""
    follows = [a.end == b.start for a, b in zip((KeyRange("", ""), *ranges), ranges, strict=False)]
    endless = bool(ranges) and ranges[-1].end is None
    writer.number(len(ranges) * 2 + endless)
    writer.raw(_pack_bits(follows))
    before = b""
    for one, joined in zip(ranges, follows, strict=True):
        for bound in ([] if joined else [one.start]) + ([] if one.end is None else [one.end]):
            key = bound.encode()
            writer.key(before, key)
            before = key


def _read_ranges(reader: _Reader) -> tuple[KeyRange, ...]:
    count, endless = divmod(reader.number(2 * RANGES_MAX + 1), 2)
    _expect(count > 0 or not endless, "no range has no end")
    before, found = b"", list[KeyRange]()
    for number, joined in enumerate(_read_bits(reader, count), start=1):
        start = before if joined else reader.key(before)
        _expect(joined or start > before, "a range does not follow the one before")
        before = start
        if endless and number == count:
            found.append(KeyRange(_text(start)))
            break
        before = reader.key(start)
        _expect(start <= before, "a range ends before it begins")
        found.append(KeyRange(_text(start), _text(before)))
    return tuple(found)


def _pack_bits(bits: Iterable[bool]) -> bytes:
    """Eight bits a byte, the first one highest, filled up with zeros."""
    text = "".join("1" if bit else "0" for bit in bits)
    size = -(-len(text) // 8)
    return int(text.ljust(8 * size, "0") or "0", 2).to_bytes(size, "big")


def _read_bits(reader: _Reader, count: int) -> list[bool]:
    size = -(-count // 8)
    text = format(int.from_bytes(reader.raw(size), "big"), f"0{8 * size}b") if size else ""
    _expect("1" not in text[count:], "bits are left over")
    return [bit == "1" for bit in text[:count]]


_QUESTIONS = (
    RootQuestion,
    SymbolsQuestion,
    SplitQuestion,
    ListQuestion,
    NamesQuestion,
    WindowsQuestion,
    KeysQuestion,
)
_QUESTION_READERS: tuple[Callable[[_Reader], Question], ...] = (
    _read_root_question,
    _read_symbols_question,
    _read_split_question,
    _read_list_question,
    _read_names_question,
    _read_windows_question,
    _read_keys_question,
)
_ANSWERS = (
    RootAnswer,
    SymbolsAnswer,
    UnequalAnswer,
    BitmapAnswer,
    NamesAnswer,
    WindowsAnswer,
    KeysAnswer,
)
_ANSWER_READERS: tuple[Callable[[_Reader], Answer], ...] = (
    _read_root_answer,
    _read_symbols_answer,
    _read_unequal_answer,
    _read_bitmap_answer,
    _read_names_answer,
    _read_windows_answer,
    _read_keys_answer,
)
