"""rclone, the tool that people copy buckets with today, between two S3 buckets: what it
does, how long that takes, and what crosses the link to the target's region.
"""

import os
import re
import subprocess
import time
from dataclasses import dataclass

from rclone_api import BINARY_PATH

from tests.support.processes import children_cpu_s
from tests.support.s3_servers import S3Bucket
from tests.support.wan import Traffic, WanLink

_RUN_S = 3600.0
_DIFFERENCES = re.compile(r"(\d+) differences found")
_MATCHING = re.compile(r"(\d+) matching files")


@dataclass(frozen=True, slots=True)
class RcloneRun:
    """One run: its exit status, what it logged, and what it cost."""

    exit_status: int
    log: str
    seconds: float
    cpu_s: float
    traffic: Traffic

    @property
    def differences(self) -> int:
        """Differences that a check has found."""
        return self._count(_DIFFERENCES)

    @property
    def matching(self) -> int:
        """Objects that a check has found equal."""
        return self._count(_MATCHING)

    def _count(self, pattern: re.Pattern[str]) -> int:
        # It leaves out what it found none of, and repeats the differences.
        return max(map(int, pattern.findall(self.log)), default=0)


def rclone_version() -> str:
    """Its version, such as v1.75.0."""
    done = subprocess.run([BINARY_PATH, "version"], capture_output=True, text=True, check=True)
    return done.stdout.split()[1]


def rclone_sync(
    source: S3Bucket, target: S3Bucket, link: WanLink | None, *options: str
) -> RcloneRun:
    """`rclone sync`, with the target behind `link`, which is reset before; without one
    nothing is counted.
    """
    return _run("sync", source, target, link, options)


def rclone_check(source: S3Bucket, target: S3Bucket, link: WanLink, *options: str) -> RcloneRun:
    """`rclone check`; `--download` makes it compare bytes and not ETags."""
    return _run("check", source, target, link, options)


def _run(
    command: str,
    source: S3Bucket,
    target: S3Bucket,
    link: WanLink | None,
    options: tuple[str, ...],
) -> RcloneRun:
    settings = {"RCLONE_CONFIG": os.devnull, "RCLONE_STATS": "0"}
    for name, bucket in (("SOURCE", source), ("TARGET", target)):
        endpoint = bucket.endpoint
        if bucket is target and link is not None:
            endpoint = link.through(endpoint)
        remote = {
            "TYPE": "s3",
            "PROVIDER": "Other",
            "ENDPOINT": endpoint.url,
            "ACCESS_KEY_ID": endpoint.access_key,
            "SECRET_ACCESS_KEY": endpoint.secret_key,
            "REGION": endpoint.region,
            "FORCE_PATH_STYLE": "true",
        }
        settings |= {f"RCLONE_CONFIG_{name}_{key}": value for key, value in remote.items()}
    if link is not None:
        link.reset()
    begun, cpu_s = time.monotonic(), children_cpu_s()
    done = subprocess.run(
        [BINARY_PATH, command, f"source:{source.name}", f"target:{target.name}", *options],
        env={**os.environ, **settings},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_RUN_S,
        check=False,
    )
    seconds = time.monotonic() - begun
    cpu_s = children_cpu_s() - cpu_s
    traffic = link.traffic() if link is not None else Traffic(0, {})
    return RcloneRun(done.returncode, done.stderr + done.stdout, seconds, cpu_s, traffic)
