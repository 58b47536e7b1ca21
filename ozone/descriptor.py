"""The `.container` file: a container's descriptor as YAML, with a checksum.

Ozone verifies a descriptor by dumping its known fields again and hashing that text, so
our dump must equal that of its library, SnakeYAML, byte for byte. PyYAML's emitter is
related to SnakeYAML: both quote alike and fold at 80 columns. `_Dumper` corrects the
differences. Text with line breaks, tabs or emoji may still differ; such a descriptor is
refused, but no datanode writes one.

In the hashed text, 64 NUL characters replace the checksum. YAML can represent them only
as a binary scalar.
"""

import hashlib
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import TypeVar

import yaml

from merkle.limits import DESCRIPTOR_BYTES_MAX
from merkle.replica import ReplicaState
from merkle.tree import ContainerId
from ozone.errors import DescriptorError

_TAG = "KeyValueContainerData"
_T = TypeVar("_T")
_INT64_MAX = (1 << 63) - 1
# The base64 text of 64 zero bytes.
_NO_CHECKSUM = f"checksum: !!binary |-\n  {'A' * 86}==\n"
_HEAD = f"!<{_TAG}>\n"
# Brackets inside each other. No field has more than one pair.
_NESTED_MAX = 100


class DescriptorRefusal(StrEnum):
    """Why a descriptor is refused: the fact `reason` of a DescriptorError."""

    TOO_LARGE = "too_large"
    NOT_YAML = "not_yaml"
    ALIAS = "alias"
    TAG_MISSING = "tag_missing"
    FIELD_MISSING = "field_missing"
    FIELD_INVALID = "field_invalid"
    STATE_UNKNOWN = "state_unknown"
    CHECKSUM_MISMATCH = "checksum_mismatch"


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The fields of a `.container` file; `metadata` is sorted by key.

    `chunks_path` and `metadata_path` are the paths at the time of writing; the volume
    may have moved since. `schema_version` is None for schema V1. `checksum` is None in
    very old files, which cannot be verified.
    """

    container_id: ContainerId
    state: ReplicaState
    chunks_path: str
    metadata_path: str
    max_size_bytes: int
    origin_node_id: str | None
    origin_pipeline_id: str | None
    layout_version: int = 2
    replica_index: int = 0
    schema_version: str | None = "3"
    data_scan_timestamp_ms: int | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    container_type: str = "KeyValueContainer"
    db_type: str = "RocksDB"
    checksum: str | None = None

    def __post_init__(self) -> None:
        assert all(a[0] < b[0] for a, b in zip(self.metadata, self.metadata[1:], strict=False))


# A repair reads the same file again and again, and to parse one takes milliseconds: a
# library that gives Ozone's bytes is slow. So few are 64 MiB if all have their limit.
@lru_cache(maxsize=64)
def parse_descriptor(raw: bytes) -> Descriptor:
    """Parse a `.container` file and verify its checksum, if it has one.

    As in Ozone, fields may be in any order, and unknown fields are ignored.

    Raises:
        DescriptorError: the fact `reason` is a DescriptorRefusal.
    """
    fields = _Fields(_root(raw))
    state = fields.text("state")
    if state not in ReplicaState.__members__:
        raise _refusal_error(
            DescriptorRefusal.STATE_UNKNOWN,
            f"the descriptor has the unknown state {state!r}",
            field="state",
        )
    descriptor = Descriptor(
        container_id=ContainerId(fields.number("containerID")),
        state=ReplicaState[state],
        chunks_path=fields.text("chunksPath"),
        metadata_path=fields.text("metadataPath"),
        max_size_bytes=fields.number("maxSize"),
        origin_node_id=fields.optional_text("originNodeId"),
        origin_pipeline_id=fields.optional_text("originPipelineId"),
        layout_version=fields.number("layOutVersion"),
        replica_index=fields.optional_number("replicaIndex") or 0,
        schema_version=fields.optional_text("schemaVersion"),
        data_scan_timestamp_ms=fields.optional_number("dataScanTimestamp"),
        metadata=fields.mapping("metadata"),
        container_type=fields.text("containerType"),
        db_type=fields.text("containerDBType"),
        checksum=fields.optional_text("checksum"),
    )
    if descriptor.checksum is not None and descriptor.checksum != descriptor_checksum(descriptor):
        raise _refusal_error(
            DescriptorRefusal.CHECKSUM_MISMATCH,
            f"the descriptor of container {descriptor.container_id} does not match its checksum",
            "checksum",
        )
    return descriptor


def dump_descriptor(descriptor: Descriptor) -> bytes:
    """The bytes of the `.container` file, equal to those that Ozone writes."""
    return (_HEAD + _dump({"checksum": descriptor.checksum}) + _body(descriptor)).encode()


def with_checksum(descriptor: Descriptor) -> Descriptor:
    """The descriptor with the checksum of its fields."""
    return replace(descriptor, checksum=descriptor_checksum(descriptor))


def descriptor_checksum(descriptor: Descriptor) -> str:
    """The SHA-256 of the SHA-256 of the canonical text without checksum, in lower-case
    hex.
    """
    once = hashlib.sha256((_HEAD + _NO_CHECKSUM + _body(descriptor)).encode()).digest()
    return hashlib.sha256(once).hexdigest()


def _body(descriptor: Descriptor) -> str:
    """The lines after the checksum, with keys in alphabetical order."""
    return _dump(
        {
            "chunksPath": descriptor.chunks_path,
            "containerDBType": descriptor.db_type,
            "containerID": descriptor.container_id,
            "containerType": descriptor.container_type,
            "dataScanTimestamp": descriptor.data_scan_timestamp_ms,
            "layOutVersion": descriptor.layout_version,
            "maxSize": descriptor.max_size_bytes,
            "metadata": _FlowMapping(descriptor.metadata),
            "metadataPath": descriptor.metadata_path,
            "originNodeId": descriptor.origin_node_id,
            "originPipelineId": descriptor.origin_pipeline_id,
            "replicaIndex": descriptor.replica_index or None,
            "schemaVersion": descriptor.schema_version,
            "state": descriptor.state.name,
        }
    )


class _FlowMapping(dict[str, str]):
    """A mapping that is dumped on one line."""


class _Dumper(yaml.SafeDumper):
    """PyYAML's emitter with SnakeYAML's rules for quoting text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012

    def ignore_aliases(self, data: object) -> bool:
        """Always True: equal strings are written out each time."""
        del data
        return True


# Text that matches one of these patterns is quoted. The characters are those that a
# match may begin with.
for _kind, _first, _pattern in (
    (
        "bool",
        "yYnNtTfFoO",
        r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF",
    ),
    (
        "int",
        "-+0123456789",
        r"[-+]?0b_*[0-1][0-1_]*|[-+]?0_*[0-7][0-7_]*|[-+]?(?:0|[1-9][0-9_]*)|[-+]?0x_*[0-9a-fA-F][0-9a-fA-F_]*"
        # The last alternative is not a number, but some readers parse it as one.
        r"|[-+]?[1-9][0-9_]*(?::[0-5]?[0-9])+|0[0-9_]+",
    ),
    (
        "float",
        "-+0123456789.",
        r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*(?:[eE][-+]?[0-9]+)"
        r"|[-+]?\.[0-9_]+(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    ),
    ("merge", "<", r"<<"),
    ("null", "~nN", r"~|null|Null|NULL"),
    ("null", ("",), r""),
    (
        "timestamp",
        "0123456789",
        r"[0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9]{4}-[0-9][0-9]?-[0-9][0-9]?(?:[Tt]|["
        r" \t]+)[0-9][0-9]?:[0-9]{2}:[0-9]{2}"
        r"(?:\.[0-9]*)?(?:[ \t]*(?:Z|[-+][0-9][0-9]?(?::[0-9]{2})?))?",
    ),
):
    _Dumper.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), list(_first)
    )
_Dumper.add_representer(
    _FlowMapping,
    lambda dumper, data: dumper.represent_mapping(
        "tag:yaml.org,2002:map", data.items(), flow_style=True
    ),
)
_Dumper.add_representer(
    str,
    # SnakeYAML dumps text of several lines as a literal block.
    lambda dumper, data: dumper.represent_scalar(
        "tag:yaml.org,2002:str",
        data,
        style="|" if re.search("[\n\x85\u2028\u2029]", data) else None,
    ),
)


def _dump(fields: dict[str, object]) -> str:
    present = {key: value for key, value in fields.items() if value is not None}
    if not present:
        return ""
    return yaml.dump(
        present,
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=80,
        line_break="\n",
    )


class _Loader(yaml.SafeLoader):
    """Composes nodes, refuses aliases: a few lines of them can expand to gigabytes; and
    many brackets inside each other, since the time for each grows with their number.
    """

    def fetch_flow_collection_start(self, kind: type[yaml.Token]) -> None:
        """The next bracket; raises YAMLError for one inside too many."""
        if self.flow_level >= _NESTED_MAX:
            raise yaml.YAMLError(f"more than {_NESTED_MAX} brackets inside each other")
        super().fetch_flow_collection_start(kind)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """The next node; raises DescriptorError for an alias."""
        if self.check_event(yaml.AliasEvent):
            raise _refusal_error(DescriptorRefusal.ALIAS, "the descriptor has an alias")
        return super().compose_node(parent, index)


def _root(raw: bytes) -> yaml.MappingNode:
    if len(raw) > DESCRIPTOR_BYTES_MAX:
        raise _refusal_error(DescriptorRefusal.TOO_LARGE, f"the descriptor is {len(raw)} bytes")
    try:
        node = yaml.compose(raw.decode(), Loader=_Loader)
    except UnicodeDecodeError as error:
        raise _refusal_error(DescriptorRefusal.NOT_YAML, "the descriptor is not UTF-8") from error
    # RecursionError: thousands of nested lists. ValueError: invalid characters and
    # versions.
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise _refusal_error(DescriptorRefusal.NOT_YAML, "the descriptor is not YAML") from error
    if not isinstance(node, yaml.MappingNode) or node.tag not in (_TAG, f"!{_TAG}"):
        raise _refusal_error(
            DescriptorRefusal.TAG_MISSING, f"the descriptor does not begin with !<{_TAG}>"
        )
    return node


class _Fields:
    """The fields of a mapping, converted to the types that Ozone expects.

    Every method raises DescriptorError for a value of another type.
    """

    def __init__(self, root: yaml.MappingNode) -> None:
        # The last of two equal keys counts, as in Ozone.
        self._nodes = {
            key.value: value for key, value in root.value if isinstance(key, yaml.ScalarNode)
        }

    def text(self, name: str) -> str:
        """A required text."""
        return _required(self.optional_text(name), name)

    def optional_text(self, name: str) -> str | None:
        """A text; None if it is missing or null."""
        node = self._scalar(name)
        if node is None:
            return None
        return _text(node, name)

    def number(self, name: str) -> int:
        """A required whole number."""
        return _required(self.optional_number(name), name)

    def optional_number(self, name: str) -> int | None:
        """A whole number from 0 to 2^63-1; None if it is missing or null."""
        node = self._scalar(name)
        if node is None:
            return None
        if node.tag != "tag:yaml.org,2002:int":
            raise _invalid(name, "is not a whole number")
        try:
            value = int(yaml.constructor.SafeConstructor().construct_yaml_int(node))
        # IndexError: the tag of a number without a value.
        except (ValueError, IndexError) as error:
            raise _invalid(name, "is not a whole number") from error
        if not 0 <= value <= _INT64_MAX:
            raise _invalid(name, f"is {value}, not a number from 0 to {_INT64_MAX}")
        return value

    def mapping(self, name: str) -> tuple[tuple[str, str], ...]:
        """Pairs of texts, ascending by key; empty if the field is missing."""
        node = self._nodes.get(name)
        if node is None:
            return ()
        if not isinstance(node, yaml.MappingNode):
            raise _invalid(name, "is not a mapping")
        return tuple(
            sorted({_text(key, name): _text(value, name) for key, value in node.value}.items())
        )

    def _scalar(self, name: str) -> yaml.ScalarNode | None:
        node = self._nodes.get(name)
        if node is None or node.tag == "tag:yaml.org,2002:null":
            return None
        if not isinstance(node, yaml.ScalarNode):
            raise _invalid(name, "is not a single value")
        return node


def _required(value: _T | None, name: str) -> _T:
    if value is None:
        raise _refusal_error(DescriptorRefusal.FIELD_MISSING, f"the descriptor lacks {name}", name)
    return value


def _text(node: yaml.Node, name: str) -> str:
    if not isinstance(node, yaml.ScalarNode) or node.tag != "tag:yaml.org,2002:str":
        raise _invalid(name, "is not text")
    return str(node.value)


def _invalid(name: str, what: str) -> DescriptorError:
    return _refusal_error(DescriptorRefusal.FIELD_INVALID, f"in the descriptor {name} {what}", name)


def _refusal_error(
    reason: DescriptorRefusal, message: str, field: str | None = None
) -> DescriptorError:
    return DescriptorError(message, reason=reason.value, field=field)
