"""The result of the demo, and its JSON document."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from admin.demo.cluster import ScannedReplica
from admin.demo.damage import InflictedDamage
from admin.demo.offline_check import Proof
from merkle.outcome import Verdict
from merkle.tree import ContainerId, root_hex
from runtime.exit_codes import ExitCode
from runtime.json_numbers import exact
from runtime.output import JsonObject


@dataclass(slots=True)
class AgentKill:
    """When an agent was killed, and what it had written by then."""

    replica: str
    after_s: float
    windows_written: int
    container_id: ContainerId | None


@dataclass(slots=True)
class DemoResult:
    """The result of the demo: scans before and after, jobs, verdicts and the proof."""

    replicas: tuple[str, ...] = ()
    inflicted: tuple[InflictedDamage, ...] = ()
    before: list[ScannedReplica] = field(default_factory=list)
    after: list[ScannedReplica] = field(default_factory=list)
    verdicts: dict[ContainerId, Verdict] = field(default_factory=dict)
    refused: dict[ContainerId, str] = field(default_factory=dict)
    jobs: list[Mapping[str, object]] = field(default_factory=list)
    kill: AgentKill | None = None
    proof: Proof | None = None
    elapsed_s: float = 0.0

    @property
    def lost(self) -> list[ContainerId]:
        """Containers with a window that no replica holds."""
        return sorted(i for i, verdict in self.verdicts.items() if verdict is Verdict.UNRECOVERABLE)

    @property
    def conflicts(self) -> list[ContainerId]:
        """Containers whose replicas contradict each other."""
        return sorted(i for i, verdict in self.verdicts.items() if verdict is Verdict.CONFLICT)

    @property
    def unverifiable(self) -> list[ContainerId]:
        """Containers written without checksums."""
        return sorted(self.proof.unverifiable) if self.proof else []

    @property
    def unhealed(self) -> list[ContainerId]:
        """Containers with a flaw on disk, a finding in the last scan, or diverged
        replicas.
        """
        flawed = set(self.proof.flawed()) if self.proof else set()
        flawed |= {
            replica.container_id for replica in self.after if replica.findings
        } | self.diverged
        return sorted(flawed - set(self.unverifiable))

    @property
    def diverged(self) -> set[ContainerId]:
        """Containers whose replicas have different roots after the last scan."""
        roots: dict[ContainerId, set[int]] = {}
        for replica in self.after:
            if not replica.replica_index:
                roots.setdefault(replica.container_id, set()).add(replica.data_checksum)
        return {container_id for container_id, found in roots.items() if len(found) > 1}

    @property
    def not_reconciled(self) -> list[ContainerId]:
        """Containers that were read and have no flaw, but that the controller does not
        reconcile: erasure-coded ones, for example.
        """
        seen = {replica.container_id for replica in self.after}
        flawed = set(self.unhealed) | set(self.unverifiable)
        return sorted(seen & self.refused.keys() - self.verdicts.keys() - flawed)

    @property
    def healed(self) -> list[ContainerId]:
        """Containers that were reconciled and whose replicas are proven undamaged and
        equal.
        """
        seen = {replica.container_id for replica in self.after}
        left = set(self.unhealed) | set(self.unverifiable) | set(self.not_reconciled)
        return sorted(seen - left)

    @property
    def exit_status(self) -> ExitCode:
        """The exit status of the command."""
        if self.lost or self.conflicts:
            return ExitCode.UNRECOVERABLE
        if self.unhealed:
            return ExitCode.FAILED
        if self.healed:
            return ExitCode.CLEAN
        if self.not_reconciled:
            return ExitCode.REFUSED
        return ExitCode.CLEAN if self.unverifiable else ExitCode.FAILED

    @property
    def summary(self) -> str:
        """The last line of the output."""
        match self.exit_status:
            case ExitCode.CLEAN:
                return "HEALED" if self.healed else "NOTHING TO HEAL: no recorded checksums"
            case ExitCode.UNRECOVERABLE:
                return "NOT HEALED: data are lost on every replica, or replicas are in conflict"
            case ExitCode.REFUSED:
                return "READ AND CHECKED, NONE RECONCILED: no container is eligible"
            case _:
                return "NOT HEALED"


def report(outcome: DemoResult) -> JsonObject:
    """The `data` of the JSON document."""
    containers = []
    for container_id in sorted({replica.container_id for replica in outcome.after}):
        verdict = outcome.verdicts.get(container_id)
        containers.append(
            {
                "containerID": container_id,
                "verdict": verdict.value if verdict else None,
                "refused": outcome.refused.get(container_id),
                "healed": container_id in outcome.healed,
                "before": _replicas_json(outcome.before, container_id),
                "after": _replicas_json(outcome.after, container_id),
            }
        )
    return {
        "replicas": list(outcome.replicas),
        "healed": outcome.healed,
        "unhealed": outcome.unhealed,
        "unverifiable": outcome.unverifiable,
        "notReconciled": outcome.not_reconciled,
        "unrecoverable": outcome.lost,
        "conflicts": outcome.conflicts,
        "damageAdded": [
            {
                "damage": one.damage.value,
                "replica": one.replica,
                "containerID": one.container_id,
                "blockID": exact(one.block_id),
                "offset": one.offset,
            }
            for one in outcome.inflicted
        ],
        "kill": outcome.kill and _kill_json(outcome.kill),
        "containers": containers,
        "jobs": outcome.jobs,
        "proof": outcome.proof and _proof_json(outcome.proof),
        "elapsed_s": round(outcome.elapsed_s, 3),
    }


def _replicas_json(scanned: Sequence[ScannedReplica], container_id: ContainerId) -> JsonObject:
    return {
        replica.replica: {
            "dataChecksum": root_hex(replica.data_checksum),
            "state": replica.state,
            "findings": list(replica.findings),
            **({"refused": replica.refusal} if replica.refusal else {}),
        }
        for replica in scanned
        if replica.container_id == container_id
    }


def _kill_json(kill: AgentKill) -> JsonObject:
    return {
        "replica": kill.replica,
        "after_s": round(kill.after_s, 3),
        "windowsWritten": kill.windows_written,
        "containerID": kill.container_id,
    }


def _proof_json(proof: Proof) -> JsonObject:
    return {
        "bytesVerified": proof.windows_matching_bytes,
        "bytesCompared": proof.compared_bytes,
        "flaws": [
            {"containerID": flaw.container_id, "replica": flaw.replica, "text": flaw.text}
            for flaw in proof.flaws
        ],
        "surplus": [
            {
                "containerID": extra.container_id,
                "replica": extra.replica,
                "blockID": exact(extra.block_id),
                "length": extra.length_bytes,
            }
            for extra in proof.surplus
        ],
    }


def containers_text(container_ids: Sequence[ContainerId]) -> str:
    return ("container " if len(container_ids) == 1 else "containers ") + ", ".join(
        map(str, container_ids)
    )
