"""`treefold bucket` on real stores: addresses, runs of the command, and what a store
holds as another client sees it.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from botocore.client import BaseClient
from click.testing import CliRunner

from admin.cli import treefold
from replicator.stores.opening import open_store
from replicator.stores.port import ObjectProperties, Store
from replicator.stores.s3 import open_s3
from tests.support.s3_servers import S3Bucket, S3Endpoint
from tests.support.stores import ANYTHING, s3_client

# Each broke some tool: for signatures, paths, XML, listings or their order.
ODD_KEYS = (
    "plain",
    "//",
    "a//b",
    "folder/",
    "..",
    "a/../b",
    "a?b=c",
    "a%b",
    "%2F",
    "a+b c",
    "\u00fc",
    "u\u0308",
    # By UTF-16 units an emoji sorts before the full-width forms, by UTF-8 after.
    "\uff01x",
    "\uff01y",
    "😀1",
    "😀2",
    "n" * 1000,
)
METADATA_2K = tuple((f"name-{i}", f"{i}" * (2048 // 8 - 6)) for i in range(8))
TEN_TAGS = tuple((f"tag{i}", f"value {i}") for i in range(10))
HEADERS = (
    ("cache-control", "max-age=60, public"),
    ("content-disposition", 'attachment; filename="a.txt"'),
    ("content-encoding", "gzip"),
    ("content-language", "de"),
    ("content-type", "text/plain; charset=utf-8"),
)
EVERYONE_READS = (('uri="http://acs.amazonaws.com/groups/global/AllUsers"', "READ"),)
RICH = {
    "metadata": ObjectProperties(metadata=METADATA_2K),
    "tags": ObjectProperties(tags=TEN_TAGS),
    "headers": ObjectProperties(headers=HEADERS),
    "acl": ObjectProperties(acl=EVERYONE_READS),
    "all": ObjectProperties(METADATA_2K, TEN_TAGS, HEADERS, EVERYONE_READS),
}


def s3_address(bucket: S3Bucket, endpoint: S3Endpoint | None = None) -> str:
    """The bucket as an argument, by another way to its server if `endpoint` names
    one.
    """
    used = endpoint or bucket.endpoint
    return f"s3://{bucket.name}?endpoint_url={quote(used.url, safe='')}&region={used.region}"


@contextmanager
def opened(address: str, endpoint: S3Endpoint) -> Iterator[Store]:
    """The store at an address, to be written to by the endpoint's user."""
    if address.startswith("local:"):
        with open_store(address, may_write=True, create=True) as store:
            yield store
        return
    with closing(s3_client(endpoint)) as client:
        yield open_s3(address, may_write=True, client=client)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended; `documents` are its lines of JSON."""

    exit_status: int
    documents: tuple[dict[str, Any], ...]
    stderr: str

    @property
    def last(self) -> dict[str, Any]:
        """The report itself."""
        assert self.documents, self.stderr
        return self.documents[-1]


@dataclass(frozen=True, slots=True)
class BucketPair:
    """A source and a target by their addresses, and the state of their syncs. The
    endpoint's user is one of both stores.
    """

    source: str
    target: str
    state: Path
    endpoint: S3Endpoint

    def sync(self, *options: str) -> CommandResult:
        """Run `treefold bucket sync`."""
        return self._run("sync", *options)

    def verify(self, level: str) -> CommandResult:
        """Run `treefold bucket verify`."""
        return self._run("verify", "--level", level)

    def sync_process(self) -> list[str]:
        """The command of a sync, to be run with the endpoint's environment."""
        return [sys.executable, "-m", "admin.cli", *self._words("sync")]

    def _run(self, command: str, *options: str) -> CommandResult:
        result = CliRunner().invoke(
            treefold, self._words(command, *options), env=self.endpoint.environment
        )
        documents = tuple(json.loads(line) for line in result.stdout.splitlines())
        return CommandResult(result.exit_code, documents, result.stderr)

    def _words(self, command: str, *options: str) -> list[str]:
        state = ["--state", str(self.state), "--json"]
        return ["bucket", command, self.source, self.target, *state, *options]


@dataclass(frozen=True, slots=True)
class HeldObject:
    """One object as botocore reads it; `body` is its SHA-256."""

    body: str
    metadata: Mapping[str, str]
    tags: Mapping[str, str]
    headers: Mapping[str, str]
    grants: tuple[tuple[str, str], ...]


def digest(body: bytes) -> str:
    """The SHA-256 of a body in hexadecimal digits."""
    return hashlib.sha256(body).hexdigest()


def held(bucket: S3Bucket, *, has_acls: bool = True) -> dict[str, HeldObject]:
    """Every current object of a bucket."""
    with bucket.endpoint.client() as client:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket.name)
        keys = [row["Key"] for page in pages for row in page.get("Contents", ())]
        return {key: _held(client, bucket.name, key, has_acls=has_acls) for key in keys}


def _held(client: BaseClient, bucket: str, key: str, *, has_acls: bool) -> HeldObject:
    answer = client.get_object(Bucket=bucket, Key=key)
    body = answer["Body"].read()
    head = client.head_object(Bucket=bucket, Key=key)
    tags = client.get_object_tagging(Bucket=bucket, Key=key)["TagSet"]
    sent = {
        "cache-control": head.get("CacheControl"),
        "content-disposition": head.get("ContentDisposition"),
        "content-encoding": head.get("ContentEncoding"),
        "content-language": head.get("ContentLanguage"),
        "content-type": head.get("ContentType"),
    }
    grants = client.get_object_acl(Bucket=bucket, Key=key)["Grants"] if has_acls else []
    return HeldObject(
        body=digest(body),
        metadata=head["Metadata"],
        tags={tag["Key"]: tag["Value"] for tag in tags},
        headers={name: text for name, text in sent.items() if text},
        grants=tuple(
            (grant["Grantee"]["URI"], grant["Permission"])
            for grant in grants
            if "URI" in grant["Grantee"]
        ),
    )


def write_all(store: Store, *, keeps_headers: bool = True) -> dict[str, bytes]:
    """Odd keys, every kind of property and an empty object; returns the bodies."""
    bodies = {key: f"body of {key[:20]}".encode() for key in ODD_KEYS}
    bodies |= {f"rich/{name}": name.encode() * 100 for name in RICH} | {"empty": b""}
    for key, body in bodies.items():
        properties = RICH.get(key.removeprefix("rich/"), ObjectProperties())
        if not keeps_headers:
            properties = ObjectProperties(properties.metadata, properties.tags)
        store.writer.put(key, body, properties, ANYTHING)
    return bodies


def write_large(store: Store, key: str, body: bytes, properties: ObjectProperties) -> None:
    """One object in parts of 8 MiB."""
    upload = store.upload_writer.begin(key, properties)
    step = 8 << 20
    parts = [
        store.upload_writer.write_part(key, upload, number, body[first : first + step])
        for number, first in enumerate(range(0, len(body), step), start=1)
    ]
    store.upload_writer.complete(key, upload, parts, properties, ANYTHING)
