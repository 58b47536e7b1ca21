"""Two buckets with a counted link between them, and runs of `treefold bucket` on them.

The commands run as processes of their own, like the peer that they are compared with.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from botocore.client import BaseClient

from tests.support.ozone import OzoneCluster
from tests.support.processes import ROOT, children_cpu_s
from tests.support.rgw import RgwPair
from tests.support.s3_servers import S3Bucket, S3Endpoint, ministack
from tests.support.wan import Crossing, Traffic, WanLink

METADATA = {"origin": "0123456789abcdef0123456789abcdef0123456789ab"}
TAGS = "team=storage"
_LISTINGS = frozenset({"GET bucket", "GET bucket?list-type", "GET bucket?versions"})
_WRITERS = 8
# The parts of a copy, as `treefold bucket sync` makes them, and of boto3's uploads.
PART_BYTES = 8 << 20
_RUN_S = 3600.0
# How a sync ends that has made the target equal, and one that cannot show it.
_EQUAL, _UNPROVEN = 0, 5


@dataclass(frozen=True, slots=True)
class CommandRun:
    """One run of a command: its last line of output, and what it cost."""

    report: Mapping[str, Any]
    seconds: float
    cpu_s: float
    traffic: Traffic


@dataclass(frozen=True, slots=True)
class BucketPair:
    """A bucket, its copy to be, and the link that leads to the latter, unless
    `is_direct`: then nothing is counted. `folder` takes credentials and the state of
    each pair. No listing of Ozone `shows_equality`. `collect_garbage` lets the target
    give back the space of what was deleted.
    """

    source: S3Bucket
    target: S3Bucket
    link: WanLink
    folder: Path
    shows_equality: bool = True
    is_direct: bool = False
    collect_garbage: Callable[[], None] | None = None

    def sync(self, *options: str) -> CommandRun:
        """`treefold bucket sync`; the link is reset before.

        Raises:
            AssertionError: the sides are not equal afterwards, as far as that shows.
        """
        return self._run("sync", *options, "--state", str(self._state))

    def verify(self, *options: str) -> CommandRun:
        """`treefold bucket verify`, with what the latest sync recorded."""
        return self._run("verify", *options, "--state", str(self._state))

    def start_sync(self) -> "subprocess.Popen[str]":
        """A sync that goes on while the caller does something to it."""
        return self._start("sync", "--state", str(self._state))

    def finished(self, process: "subprocess.Popen[str]") -> Mapping[str, Any]:
        """The last line of a command that ends as it should."""
        output, errors = process.communicate(timeout=_RUN_S)
        wanted = _EQUAL if self.shows_equality else _UNPROVEN
        assert process.returncode == wanted, f"{process.returncode}: {output}{errors}"
        report: Mapping[str, Any] = json.loads(output.splitlines()[-1])
        assert not report.get("failed"), report
        return report

    def fresh_target(self) -> "BucketPair":
        """The same source with an empty target."""
        return replace(self, target=self.target.endpoint.fresh_bucket())

    def fresh_source(self) -> "BucketPair":
        """The same target with an empty source."""
        return replace(self, source=self.source.endpoint.fresh_bucket())

    def empty_target(self) -> None:
        """Delete what a sync has copied: a store on one disk has no room for many."""
        with self.target.endpoint.client() as client:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.target.name)
            for page in pages:
                keys = [{"Key": one["Key"]} for one in page.get("Contents", ())]
                if keys:
                    client.delete_objects(Bucket=self.target.name, Delete={"Objects": keys})
        if self.collect_garbage is not None:
            self.collect_garbage()

    def direct(self) -> "BucketPair":
        """The same pair without the link: a proxy takes CPU, which the stores need."""
        return replace(self, is_direct=True)

    @property
    def _state(self) -> Path:
        return self.folder / f"state-{self.target.name}"

    def _run(self, command: str, *options: str) -> CommandRun:
        self.link.reset()
        begun, cpu_s = time.monotonic(), children_cpu_s()
        report = self.finished(self._start(command, *options))
        seconds = time.monotonic() - begun
        return CommandRun(report, seconds, children_cpu_s() - cpu_s, self.link.traffic())

    def _start(self, command: str, *options: str) -> "subprocess.Popen[str]":
        credentials = self.folder / "credentials"
        sides = {"source": self.source, "target": self.target}
        credentials.write_text(
            "".join(
                f"[{name}]\naws_access_key_id = {side.endpoint.access_key}\n"
                f"aws_secret_access_key = {side.endpoint.secret_key}\n"
                for name, side in sides.items()
            )
        )
        direct = self.target.endpoint
        theirs = (direct if self.is_direct else self.link.through(direct)).url
        words = [
            f"s3://{self.source.name}?endpoint_url={self.source.endpoint.url}&profile=source",
            f"s3://{self.target.name}?endpoint_url={theirs}&profile=target",
        ]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        # Of an installed package all modules are compiled.
        inherited.pop("PYTHONDONTWRITEBYTECODE", None)
        return subprocess.Popen(
            [sys.executable, "-m", "admin.cli", "bucket", command, *words, "--json", *options],
            env={
                **inherited,
                "AWS_SHARED_CREDENTIALS_FILE": str(credentials),
                "AWS_CONFIG_FILE": os.devnull,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


class PairFactory:
    """Makes pairs of fresh buckets on two stores."""

    def __init__(
        self,
        source: S3Endpoint,
        target: S3Endpoint,
        link: WanLink,
        folder: Path,
        *,
        shows_equality: bool = True,
        collect_garbage: Callable[[], None] | None = None,
    ) -> None:
        self._source, self._target, self._link, self._folder = source, target, link, folder
        self._shows_equality = shows_equality
        self._collect_garbage = collect_garbage

    def pair(self) -> BucketPair:
        """Two empty buckets."""
        buckets = self._source.fresh_bucket(), self._target.fresh_bucket()
        return BucketPair(
            *buckets,
            self._link,
            self._folder,
            self._shows_equality,
            collect_garbage=self._collect_garbage,
        )


@contextmanager
def opened_stores(target: str, endpoint: str | None) -> Iterator[PairFactory]:
    """Two stores with a link before the second: `emulator` starts two ministacks, `rgw`
    two Ceph stores; `ozone` copies from a ministack to the gateway at `endpoint`, or to
    a cluster of its own. What was started ends with the block.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-sync-")))

        def emulator(name: str) -> S3Endpoint:
            server = stack.enter_context(ministack(folder / f"{name}.log"))
            return S3Endpoint(server.url, "test", "test")

        collect: Callable[[], None] | None = None
        if target == "rgw":
            sites = stack.enter_context(RgwPair(ROOT / ".testbed" / "ceph-bench-sync"))
            source, theirs = sites.site("a").endpoint, sites.site("b").endpoint
            collect = partial(sites.collect_garbage, "b")
        elif target == "ozone":
            # Without security it takes any credentials.
            if endpoint is None:
                cluster = stack.enter_context(OzoneCluster(ROOT / ".testbed"))
                endpoint = f"http://{cluster.s3_address}"
            source, theirs = emulator("source"), S3Endpoint(endpoint, "any", "thing")
        else:
            source, theirs = emulator("source"), emulator("target")
        link = stack.enter_context(WanLink(theirs.address))
        yield PairFactory(
            source,
            theirs,
            link,
            folder,
            shows_equality=target != "ozone",
            collect_garbage=collect,
        )


def fill(bucket: S3Bucket, count: int, size_bytes: int, *, in_parts: bool = False) -> None:
    """Put objects of random bytes, each with one metadata header and one tag, with
    `in_parts` as most clients upload large ones. Their names have 26 characters.
    """
    given: dict[str, Any] = {"Metadata": METADATA, "Tagging": TAGS}
    with bucket.endpoint.client() as client, ThreadPoolExecutor(_WRITERS) as writers:

        def put(number: int) -> None:
            body = _body(number, size_bytes)
            if in_parts:
                _upload(client, bucket, key_of(number), body, given)
                return
            client.put_object(Bucket=bucket.name, Key=key_of(number), Body=body, **given)

        for _ in writers.map(put, range(count)):
            pass


def key_of(number: int) -> str:
    """The name of an object, with 26 characters."""
    return f"warehouse/events/{number:09d}"


def put_changed(client: BaseClient, bucket: S3Bucket, size_bytes: int) -> None:
    """Put object 0 of `fill` again, with another byte in its middle."""
    body = bytearray(_body(0, size_bytes))
    body[size_bytes // 2] ^= 1
    given = {"Metadata": METADATA, "Tagging": TAGS}
    client.put_object(Bucket=bucket.name, Key=key_of(0), Body=bytes(body), **given)


def _upload(
    client: BaseClient, bucket: S3Bucket, key: str, body: bytes, given: Mapping[str, Any]
) -> None:
    place = {"Bucket": bucket.name, "Key": key}
    upload = {**place, "UploadId": client.create_multipart_upload(**place, **given)["UploadId"]}
    parts = [
        {
            "PartNumber": number,
            "ETag": client.upload_part(
                **upload, PartNumber=number, Body=body[first : first + PART_BYTES]
            )["ETag"],
        }
        for number, first in enumerate(range(0, len(body), PART_BYTES), start=1)
    ]
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})


def _body(number: int, size_bytes: int) -> bytes:
    return np.random.default_rng(number).bytes(size_bytes)


def listings(traffic: Traffic) -> int:
    """The bytes of listings: what comparing buckets costs."""
    return _length(traffic, is_listing=True)


def others(traffic: Traffic) -> int:
    """All bytes but those of listings."""
    return _length(traffic, is_listing=False)


def parts_of(traffic: Traffic) -> Crossing:
    """What crossed of parts, their heads included."""
    return traffic.kinds.get("PUT object?uploadId", Crossing(0, 0, 0))


def _length(traffic: Traffic, *, is_listing: bool) -> int:
    return sum(
        crossing.length_bytes
        for kind, crossing in traffic.kinds.items()
        if (kind in _LISTINGS) == is_listing
    )
