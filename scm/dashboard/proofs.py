"""What was proven of buckets last, from the metrics that `treefold bucket verify`
leaves in a folder: it and the controller meet in these files.
"""

from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

_FILES_MAX = 200
_FILE_BYTES_MAX = 1 << 16
_FINISHED = "bucket_verify_finished_timestamp_seconds"
_DIFFERENCES = "bucket_verify_differences"
_OUTCOME = "bucket_verify_outcome"


@dataclass(frozen=True, slots=True)
class BucketProof:
    """The last verification of a pair: `outcome` is equal, different or unknown, and
    `finished_at_s` is in seconds since the epoch.
    """

    source: str
    target: str
    outcome: str
    differences: int
    finished_at_s: float


@dataclass(frozen=True, slots=True)
class BucketProofs:
    """The proofs of a folder, the oldest first, and what could not be read of it."""

    proofs: tuple[BucketProof, ...]
    faults: tuple[str, ...] = ()


def read_proofs(folder: Path) -> BucketProofs:
    """The proofs in the *.prom files of a folder, which may have other metrics too. A
    file that cannot be read is a fault, and what it proved is unknown.
    """
    proofs, faults = list[BucketProof](), list[str]()
    try:
        paths = sorted(folder.glob("*.prom"))
        if not folder.is_dir():
            faults.append(f"{folder} is not a folder")
    except OSError as error:
        return BucketProofs((), (f"{folder} cannot be read: {error.strerror}",))
    if len(paths) > _FILES_MAX:
        faults.append(f"{folder} has more than {_FILES_MAX} files; the others are not shown")
    for path in paths[:_FILES_MAX]:
        try:
            with path.open("rb") as file:
                raw = file.read(_FILE_BYTES_MAX + 1)
            if len(raw) > _FILE_BYTES_MAX:
                raise ValueError(f"it has more than {_FILE_BYTES_MAX} bytes")
            proofs += _proofs_of(raw.decode())
        except (OSError, ValueError, KeyError) as error:
            faults.append(f"{path} cannot be read: {error}")
    return BucketProofs(tuple(sorted(proofs, key=lambda one: one.finished_at_s)), tuple(faults))


def _proofs_of(text: str) -> list[BucketProof]:
    finished = dict[tuple[str, str], float]()
    differences = dict[tuple[str, str], int]()
    outcomes = dict[tuple[str, str], str]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith("bucket_verify_"):
                continue
            pair = sample.labels["source"], sample.labels["target"]
            if sample.name == _FINISHED:
                finished[pair] = sample.value
            elif sample.name == _DIFFERENCES:
                differences[pair] = int(sample.value)
            elif sample.name == _OUTCOME and sample.value == 1:
                outcomes[pair] = sample.labels["outcome"]
    return [
        BucketProof(*pair, outcomes.get(pair, "unknown"), differences.get(pair, 0), at_s)
        for pair, at_s in finished.items()
    ]
