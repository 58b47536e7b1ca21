"""Inputs that are nearly valid: bytes, messages, JSON and text with something changed.

All choices are the caller's `random.Random`'s, so that a seed gives the same input.
"""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

Mutate = Callable[[random.Random], bytes]

_EDGES = (0, 1, -1, 2, 127, 128, 255, 256, (1 << 31) - 1, -(1 << 31), 1 << 31, (1 << 32) - 1,
          (1 << 63) - 1, -(1 << 63), 1 << 63, (1 << 64) - 1)  # fmt: skip
_BYTES = (b"", b"\0", b"\xff" * 10 + b"\x01", b"\x80" * 9 + b"\x01", b"\x0b" * 40, b"\x12\xff\x7f")
_TEXTS = ("", "\0", "null", "~", "-1", "1e400", "9" * 40, "9" * 5000, "\u202e\x1b[2J", "{",
          "[" * 60, "../../etc/passwd", "!!python/object:os.system", "&a [*a]", '"', "\ud800",
          "nan", "x" * 70_000, "1d", "= 1", "true", "\n", "---\n", "2026-13-40T99:99")  # fmt: skip
_VALUES: tuple[object, ...] = (
    None, True, -1, 0, 1 << 63, 1 << 70, 1.5, float("inf"), "", "x" * 5000, [], {}, [[]], [None],
    {"": {}}, "../x", "\ud800", "2026-01-01T00:00:00",
)  # fmt: skip


def mutated_bytes(rng: random.Random, seed: bytes, others: Sequence[bytes]) -> bytes:
    """A few bits, bytes or stretches changed, moved, repeated or lost."""
    data = bytearray(seed)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 2, 8, 64)))
        match rng.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(data):
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                data[at:at] = rng.choice((*_BYTES, rng.randbytes(rng.randrange(20))))
            case 3:
                del data[at:end]
            case 4:
                data[at:at] = data[at:end] * rng.choice((1, 2, 50))
            case 5:
                del data[at:]
            case _:
                other = rng.choice(others)
                cut = rng.randrange(len(other) + 1)
                data[at:] = other[cut:]
    return bytes(data)


def mutated_message(rng: random.Random, seed: Message) -> bytes:
    """One message in which a few fields, at any depth, have other values."""
    message = copy.deepcopy(seed)
    for _ in range(rng.choice((1, 1, 2, 5))):
        _change_field(rng, message)
    return message.SerializePartialToString()


def mutated_text(rng: random.Random, seed: str, others: Sequence[str]) -> bytes:
    """Lines swapped, repeated, cut or lost, and words that mean something elsewhere."""
    if rng.random() < 0.2:
        raw = [other.encode(errors="replace") for other in others]
        return mutated_bytes(rng, seed.encode(), raw)
    lines = seed.split("\n")
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(lines))
        head, separator, value = lines[at].partition(rng.choice((":", "=", " ")))
        match rng.randrange(6):
            case 0:
                lines[at] = head + separator + rng.choice((" ", "")) + rng.choice(_TEXTS)
            case 1:
                lines[at] = rng.choice(_TEXTS) + separator + value
            case 2:
                lines.insert(at, rng.choice((lines[at], *rng.choice(others).split("\n"))))
            case 3:
                lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
            case 4 if len(lines) > 1:
                del lines[at]
            case _:
                lines[at] = rng.choice((" ", "\t", "- ", "[", "#")) + lines[at]
    return "\n".join(lines).encode(errors="surrogatepass")


def mutated_json(rng: random.Random, document: object) -> object:
    """The document with one value replaced, lost, repeated or buried, at any depth."""
    document = copy.deepcopy(document)
    spots = list(_spots(document))
    if not spots:
        return rng.choice(_VALUES)
    spot = rng.choice(spots)
    match rng.randrange(5):
        case 0:
            spot.remove()
        case 1 if isinstance(spot, _Item):
            spot.repeat()
        case 2:
            for _ in range(rng.choice((1, 30))):
                spot.put([spot.value])
        case 3:
            spot.put(copy.deepcopy(rng.choice(spots).value))
        case _:
            spot.put(rng.choice(_VALUES))
    return document


@dataclass(frozen=True)
class _Field:
    """A value in an object of a JSON document."""

    holder: dict[str, object]
    name: str

    @property
    def value(self) -> object:
        return self.holder[self.name]

    def put(self, value: object) -> None:
        self.holder[self.name] = value

    def remove(self) -> None:
        del self.holder[self.name]


@dataclass(frozen=True)
class _Item:
    """A value in a list of a JSON document."""

    holder: list[object]
    index: int

    @property
    def value(self) -> object:
        return self.holder[self.index]

    def put(self, value: object) -> None:
        self.holder[self.index] = value

    def remove(self) -> None:
        del self.holder[self.index]

    def repeat(self) -> None:
        self.holder.insert(self.index, self.value)


def _spots(value: object) -> Iterator[_Field | _Item]:
    """All places in a document that hold a value, outer ones first."""
    own: list[_Field | _Item] = []
    if isinstance(value, dict):
        own = [_Field(value, name) for name in value]
    elif isinstance(value, list):
        own = [_Item(value, index) for index in range(len(value))]
    for spot in own:
        yield spot
        yield from _spots(spot.value)


def _change_field(rng: random.Random, message: Message) -> None:
    fields = [one for one in message.DESCRIPTOR.fields if isinstance(one, FieldDescriptor)]
    if not fields:
        return
    field = rng.choice(fields)
    present = [one for one, _ in message.ListFields()]
    # Mostly what is there: most of what could be has no meaning here.
    if present and rng.random() < 0.8:
        field = rng.choice(present)
    is_message = field.type == FieldDescriptor.TYPE_MESSAGE
    if field.is_repeated:
        values = getattr(message, field.name)
        match rng.randrange(4):
            case 0 if is_message and len(values):
                _change_field(rng, rng.choice(values))
            case 1 if len(values):
                del values[rng.randrange(len(values))]
            case 2 if len(values):
                values.extend([values[0]] * rng.choice((1, 3, 400)))
            case _ if is_message:
                _change_field(rng, values.add())
            case _:
                values.append(_scalar(rng, field))
    elif is_message and rng.random() < 0.9:
        _change_field(rng, getattr(message, field.name))
    elif is_message or rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _scalar(rng, field))


def _scalar(rng: random.Random, field: FieldDescriptor) -> object:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.choice((*_BYTES, rng.randbytes(rng.randrange(40))))
        case FieldDescriptor.CPPTYPE_STRING:
            return rng.choice([text for text in _TEXTS if "\ud800" not in text])
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM if field.enum_type is not None:
            return rng.choice(field.enum_type.values).number
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return rng.choice((0.0, -1.0, float("inf"), float("nan"), 1e308))
        case kind:
            bits = 64 if kind in _WIDE else 32
            low = 0 if kind in _UNSIGNED else -(1 << bits - 1)
            return rng.choice([n for n in _EDGES if low <= n < low + (1 << bits)])


_UNSIGNED = (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
_WIDE = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
