"""The properties of a bucket as a document, and a bucket made from one (OZ-021)."""

import json
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from replicator.stores.address import LocalAddress, OzoneAddress, parse_address
from replicator.stores.bucket_facts import BucketFacts, BucketQuota
from replicator.stores.errors import StoreError, UnsupportedObjectError
from replicator.stores.opening import open_store
from runtime.documents import parse_json
from runtime.errors import UsageError
from runtime.output import JsonObject

_FORMAT = "treefold-bucket-properties/1"
# A bucket has a few grants and a little metadata.
DOCUMENT_BYTES_MAX = 1 << 20
_FACTS = TypeAdapter(BucketFacts)


def properties_json(address: str, facts: BucketFacts) -> JsonObject:
    """The document of a bucket. Documents of equal buckets differ in `address` only:
    what a bucket holds just now is not in them.
    """
    if facts.quota is not None:
        quota = BucketQuota(facts.quota.bytes_max, facts.quota.objects_max)
        facts = replace(facts, quota=quota)
    properties = _FACTS.dump_python(facts, mode="json")
    return {"format": _FORMAT, "address": address, "properties": properties}


def read_properties(path: Path) -> BucketFacts:
    """The properties in a document.

    Raises:
        UsageError: it cannot be read, or is not such a document.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(DOCUMENT_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if len(raw) > DOCUMENT_BYTES_MAX:
        raise UsageError(f"{path}: has over {DOCUMENT_BYTES_MAX} bytes")
    try:
        document = parse_json(raw)
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT}")
        return _FACTS.validate_json(json.dumps(document.get("properties")), strict=True)
    except (ValueError, ValidationError, AssertionError) as error:
        first = str(error).partition("\n")[0]
        raise UsageError(
            f"{path}: not the properties of a bucket: {first}",
            hint="Write them with `treefold bucket export`.",
        ) from error


def create_bucket(address: str, facts: BucketFacts) -> None:
    """Make the bucket of an address with these properties.

    Raises:
        UsageError: the address is invalid.
        ConfigError: there are no credentials.
        UnsupportedObjectError: the store does not make buckets, or has no such
            properties.
        StoreError, DiskError: the store refused, or did not answer.
    """
    match parse_address(address):
        case LocalAddress(folder):
            from replicator.stores.local_database import DATABASE_FILE

            if (folder / DATABASE_FILE).exists():
                raise StoreError(f"{address}: there is a bucket already", path=str(folder))
            if facts != BucketFacts():
                raise UnsupportedObjectError(
                    f"{address}: a local bucket has no layout, quota or ACLs",
                    hint="The properties are of another kind of store.",
                )
            with open_store(address, may_write=True, create=True):
                pass
        case OzoneAddress(text):
            from replicator.stores.ozone_describer import create_ozone_bucket

            create_ozone_bucket(text, facts)
        case _:
            raise UnsupportedObjectError(
                f"{address}: buckets of this store are not made here",
                hint="Make it with the store's own tools, then see `treefold bucket add`.",
            )
