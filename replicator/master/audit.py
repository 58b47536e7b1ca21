"""The replication master's audit file: who ordered what of which replication, and what
was refused. A line is on disk before what it records is done.
"""

from dataclasses import asdict

from replicator.master.orders import OperatorOrder
from replicator.replication import Policy, PolicyId, ReplicationOptions
from runtime.audit_chain import AuditFile


class MasterAudit(AuditFile):
    """Records what operators order. Thread-safe."""

    def added(self, policy: Policy, order: OperatorOrder) -> None:
        """Record that a replication is about to begin.

        Raises:
            DiskError: the line is not on disk; the replication must not begin.
        """
        between: dict[str, object] = {"source": policy.source, "target": policy.target}
        self._ordered("add", policy.policy_id, order, between)

    def prefixes(
        self, policy_id: PolicyId, prefixes: tuple[str, ...], order: OperatorOrder
    ) -> None:
        """Record that other keys of a replication are about to cross.

        Raises:
            DiskError: the line is not on disk; the order must not be carried out.
        """
        self._ordered("prefixes", policy_id, order, {"prefixes": list(prefixes)})

    def options(
        self, policy_id: PolicyId, options: ReplicationOptions, order: OperatorOrder
    ) -> None:
        """Record that a replication is about to have these options.

        Raises:
            DiskError: the line is not on disk; the order must not be carried out.
        """
        self._ordered("options", policy_id, order, {"options": asdict(options)})

    def ordered(self, kind: str, policy_id: PolicyId, order: OperatorOrder) -> None:
        """Record an order that changes a replication: "delete", "resume", "pause",
        "cancel", "failover" or "end_failover", or of all "enable" and "disable".

        Raises:
            DiskError: the line is not on disk; the order must not be carried out.
        """
        self._ordered(kind, policy_id, order, {})

    def _ordered(
        self, kind: str, policy_id: PolicyId, order: OperatorOrder, more: dict[str, object]
    ) -> None:
        named = {"kind": kind, "replication": policy_id, "who": order.who, "why": order.reason}
        self.append([named | more])
