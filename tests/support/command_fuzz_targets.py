"""Every parser of the files that commands keep or are given. See fuzz_targets."""

import json
import random
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from admin.build_results import BuildResult, BuildResults
from admin.client_config import client_config
from admin.plan_files import ContainerEntry, PlanFile, ReplicaEntry, load_plans, save_plans
from admin.plan_files import ReplicaPlanDocument as PlanDocument
from repair.audit import AuditLog
from repair.replica_plan import FORMAT, canonical_json, plan_digest
from runtime.audit_chain import AuditFile, chain_files
from runtime.audit_check import check_chain, read_lines
from runtime.disk import Disk
from runtime.output import JsonObject
from tests.support.fuzz_targets import Target
from tests.support.mutation import mutated_bytes, mutated_json, mutated_text

_PLAN: JsonObject = {
    "format": FORMAT, "container": 12, "datanode": "dn-1", "root": "7f", "peers": {"dn-2": "80"},
    "unread": {"dn-3": "peer_unavailable"}, "bytes": 300,
    "writes": [
        {
            "block": "20", "chunk": 0, "window": 1, "windows": 2, "offset": 100, "length": 300,
            "source": "dn-2",
        }
    ],
    "records": [{"block": "20", "digest": "ab"}], "tombstones": ["30"], "bcsID": 7,
    "returnsToService": True, "left": [],
}  # fmt: skip
_CLIENT = (
    'controller = "127.0.0.1:9896"\ninsecure = false\n[tls]\ncert = "c"\nkey = "k"\nca = "a"\n'
    '[roles]\noperators = ["alice"]\n'
)
_SHOWN: JsonObject = {
    "containerID": 1, "state": "CLOSED", "dataChecksum": "0", "source": "data", "blocks": 0,
    "deletedBlocks": 0, "findings": [], "notes": [],
}  # fmt: skip


def _client(scratch: Path) -> Target:
    """The settings of commands."""
    path = scratch / "client.toml"

    def accept(raw: bytes) -> None:
        path.write_bytes(raw)
        client_config({"TREEFOLD_CONFIG": str(path)})

    return Target("client.toml", lambda rng: mutated_text(rng, _CLIENT, [_CLIENT]), accept)


def _plans(scratch: Path) -> Target:
    """A plan file, whose digests are right of what was changed in it."""
    path = scratch / "night.plan"
    raw = canonical_json(_PLAN)
    entry = ReplicaEntry(plan_digest(raw), PlanDocument.model_validate_json(raw), _PLAN)
    save_plans(PlanFile((ContainerEntry(12, (entry,), {"dn-3": "silent"}),)), path)
    seed = path.read_bytes()

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.2:
            return mutated_bytes(rng, seed, [seed])
        document = json.loads(seed)
        stored = document["containers"][0]["replicas"][0]
        if rng.random() < 0.7:
            stored["plan"] = mutated_json(rng, stored["plan"])
            stored["digest"] = plan_digest(canonical_json(stored["plan"]))
        else:
            document = mutated_json(rng, document)
        if isinstance(document, dict):
            signed = {name: value for name, value in document.items() if name != "digest"}
            document["digest"] = plan_digest(canonical_json(signed))
        return json.dumps(document).encode()

    def accept(raw: bytes) -> None:
        path.write_bytes(raw)
        plans = load_plans(path)
        assert all(isinstance(one, str) for entry in plans.containers for one in entry.unknown)
        for container_id in plans.container_ids:
            plans.is_partial(container_id)
        assert len(plans.replicas) <= 1

    return Target("plan file", make, accept)


def _audit(scratch: Path) -> Target:
    """An audit file, checked, read, and continued."""
    path = scratch / "audit.jsonl"
    with closing(AuditLog(path)) as audit:
        for block in range(4):
            audit.write(container=1, block=block, offset=0, length=5, source="dn-2", job="j")
        audit.delete(1, [7])
    seed = path.read_bytes()

    def accept(raw: bytes) -> None:
        path.write_bytes(raw)
        report = check_chain([path], Disk())
        assert report.broken is not None or seed.startswith(raw)
        list(read_lines([path], Disk(), note=lambda *_: None))
        with closing(AuditFile(path)) as again:
            again.append([{"kind": "delete"}])
        for one in chain_files(path, Disk()):
            one.unlink()

    return Target("audit file", _of_lines(seed), accept, refuses=False)


def _of_lines(seed: bytes) -> Callable[[random.Random], bytes]:
    return lambda rng: mutated_bytes(rng, seed, seed.splitlines(keepends=True))


def _results(scratch: Path) -> Target:
    """What an interrupted build of trees has kept."""
    folder, volumes = scratch / "results", [Path("/v")]
    result = asdict(BuildResult("v", _SHOWN, ("f",), ("n",)))
    with closing(BuildResults(folder, volumes, "data", resume=False)):
        (path,) = folder.iterdir()
    document = ["/v", 1, "a version", result]

    def make(rng: random.Random) -> bytes:
        raw = json.dumps(mutated_json(rng, document)).encode() + b"\n"
        return mutated_bytes(rng, raw, [raw]) if rng.random() < 0.3 else raw

    def accept(raw: bytes) -> None:
        path.write_bytes(raw)
        with closing(BuildResults(folder, volumes, "data", resume=True)) as results:
            assert results.count <= 1

    return Target("results of a build", make, accept)


COMMAND_FILES: Mapping[str, Callable[[Path], Target]] = {
    "client.toml": _client,
    "plan file": _plans,
    "audit file": _audit,
    "results of a build": _results,
}
