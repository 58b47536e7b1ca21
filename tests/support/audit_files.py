"""Audit files for tests: written as processes write them, and read back."""

import json
from hashlib import sha256
from pathlib import Path

from runtime.audit_chain import AuditFile
from runtime.audit_check import AuditReport, audit_chains, check_chain
from runtime.disk import Disk


def write_lines(path: Path, *names: str, file_bytes_max: int = 1 << 20) -> None:
    """One start of a process that writes a line for each name."""
    audit = AuditFile(path, file_bytes_max=file_bytes_max)
    for name in names:
        audit.append([{"kind": "test", "name": name}])
    audit.close()


def signed_line(sequence: int, beginning: str) -> bytes:
    """A line whose hash is right, the first of its chain: `beginning` is an object
    without its end.
    """
    previous = sha256(b"").hexdigest()
    body = f'{beginning}, "seq": {sequence}, "prev": "{previous}"'.encode()
    return body + b', "hash": "' + sha256(body).hexdigest().encode() + b'"}\n'


def audit_lines(path: Path) -> list[dict[str, object]]:
    """All lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_folder(folder: Path, *, known_head: str = "", after: str = "") -> AuditReport:
    """The report on the one chain in a folder."""
    [files] = audit_chains([folder], Disk())
    return check_chain(files, Disk(), known_head=known_head, after=after)
