"""Drives Ozone's own reconciliation of containers, within limits, until each has ended.

Where SCM is asked, it can order one thing: that all replicas of a container reconcile.
So a container is the unit of work here, and no replica gets an order of its own.
"""

from collections.abc import Iterable, Mapping, Sequence

from merkle.errors import ReconcileError
from merkle.tree import ContainerId
from ozone.errors import ContainerNotFoundError
from runtime.errors import PeerRefusedError
from scm.container_reports import ClusterReports, ContainerReport, read_reports, ruling_of
from scm.ozone_rounds import OzoneRun, RoundStep, observe, refused, request_sent
from scm.pace import Pace, PaceLimits


class OzoneDriver:
    """The containers under way and those that wait. Not thread-safe."""

    def __init__(self, cluster: ClusterReports, limits: PaceLimits, *, settle_s: float) -> None:
        """A round without a change of a root ends after `settle_s` seconds; longer than
        two heartbeats of the datanodes.
        """
        self._cluster = cluster
        self._pace = Pace(limits)
        self._settle_s = settle_s
        # In the order in which they were added.
        self._runs: dict[ContainerId, OzoneRun] = {}

    def add(self, container_ids: Iterable[ContainerId]) -> None:
        """Let these containers wait for their turn; one that is known already stays."""
        for number in container_ids:
            self._runs.setdefault(number, OzoneRun(number))

    @property
    def runs(self) -> tuple[OzoneRun, ...]:
        """All that have not ended, in the order in which they were added."""
        return tuple(self._runs.values())

    def poll(self, now_s: float) -> list[OzoneRun]:
        """Look at the cluster once, request what is due, and return what has ended.

        Raises:
            ReconcileError: SCM does not answer; nothing is lost, the next poll goes on.
        """
        wanted = list(self._runs)
        if not wanted:
            return []
        reports = read_reports(self._cluster, wanted)
        due = list[ContainerId]()
        for number, run in self._runs.items():
            if run.outcome is not None:
                # The last poll failed after it.
                continue
            report = reports.get(number)
            ruling = ruling_of(number, report)
            if not ruling.is_ok or report is None:
                self._runs[number] = refused(run, ruling.message)
                continue
            changed, step = observe(
                run, report.replicas, report.known, now_s=now_s, settle_s=self._settle_s
            )
            self._runs[number] = changed
            peers = [replica.peer for replica in report.replicas]
            is_due = step is RoundStep.REQUEST
            if is_due and self._pace.may_request(number, peers, now_s):
                # Before the answer: a request whose answer is lost may be under way.
                self._pace.requested(number, peers, now_s)
                due.append(number)
        if due:
            self._request(due, reports, now_s)
        return self._ended()

    def _request(
        self,
        due: Sequence[ContainerId],
        reports: Mapping[ContainerId, ContainerReport],
        now_s: float,
    ) -> None:
        try:
            answers = self._cluster.reconcile(due)
        except ReconcileError:
            # Whether SCM has them is not known: the roots will tell.
            answers = dict.fromkeys(due)
            self._note_answers(answers, reports, now_s)
            raise
        self._note_answers(answers, reports, now_s)

    def _note_answers(
        self,
        answers: dict[ContainerId, PeerRefusedError | ContainerNotFoundError | None],
        reports: Mapping[ContainerId, ContainerReport],
        now_s: float,
    ) -> None:
        for number, refusal in answers.items():
            run = self._runs[number]
            if refusal is None:
                run = request_sent(run, reports[number].replicas, now_s)
            else:
                run = refused(run, refusal.message)
            self._runs[number] = run

    def _ended(self) -> list[OzoneRun]:
        ended = [run for run in self._runs.values() if run.outcome is not None]
        for run in ended:
            del self._runs[run.container_id]
            self._pace.ended(run.container_id)
        return ended
