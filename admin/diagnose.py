"""`treefold diagnose`: what is wrong with the replicas of a running cluster, read from
its datanodes, or from agents on their hosts where there are any.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

from admin.answer import container_ids, json_option
from admin.client_config import client_config
from admin.cluster_agents import ClusterAgents, agents_option
from admin.clusters import (
    UNKNOWN_CONTAINER_HINT,
    cluster_option,
    open_cluster,
    open_datanode,
)
from admin.command_result import CommandResult, command_result
from admin.diagnosis_picture import (
    DRAWN_MAX,
    DrawnDiagnosis,
    draw_diagnoses,
    drawn_diagnosis,
)
from admin.diagnosis_text import diagnosis_json, print_diagnosis
from admin.option_types import WholeNumber
from admin.paths import LocalPath
from live.diagnosis import Diagnosis, reason_not_compared
from live.results import ResultsFile
from live.survey import ClusterSurvey
from merkle.limits import CONTAINER_ID_MAX
from merkle.outcome import DIVERGED_VERDICTS, Verdict
from merkle.tree import ContainerId
from ozone.scm_client import ClusterContainer, ScmClient
from runtime.disk import Disk
from runtime.errors import UsageError
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject, print_line
from runtime.progress import ProgressSink, ProgressStyle, progress_sink
from runtime.setting_values import parse_rate

# Of each datanode, for data and trees: a tenth of a disk's or a network's.
_RATE = "100MB/s"
# Of the containers that are not equal; of the rest only their number is kept.
_SHOWN_MAX = 1_000
_NOT_COMPARED = "NOT_COMPARED"


@dataclass
class _Tally:
    """How many containers got which verdict, and the first that are not equal."""

    verdicts: Counter[str] = field(default_factory=Counter)
    findings: list[JsonObject] = field(default_factory=list)
    unreachable: int = 0
    last_id: int = 0

    @property
    def containers(self) -> int:
        """How many there were."""
        return self.verdicts.total()

    def add(self, result: JsonObject) -> None:
        """Count one line of results."""
        self.verdicts[str(result["verdict"])] += 1
        self.unreachable += bool(result.get("unreachable"))
        self.last_id = max(self.last_id, int(str(result["containerID"])))
        if result["verdict"] not in (Verdict.MATCH.value, _NOT_COMPARED):
            self.findings.append(result)
            # The file has them all.
            del self.findings[_SHOWN_MAX:]

    def exit_status(self) -> ExitCode:
        """The worst that was found."""
        if self.verdicts[Verdict.UNRECOVERABLE.value]:
            return ExitCode.UNRECOVERABLE
        if any(self.verdicts[verdict.value] for verdict in DIVERGED_VERDICTS):
            return ExitCode.FINDINGS
        if self.unreachable:
            return ExitCode.UNREACHABLE
        return ExitCode.PARTLY if self.verdicts[Verdict.UNKNOWN.value] else ExitCode.CLEAN


@click.command()
@click.argument("arguments", metavar="[ID... | -]", nargs=-1)
@cluster_option(required=True)
@click.option("--deep", is_flag=True, help="Read all data too, and check each window of it.")
@click.option(
    "--rate",
    default=_RATE,
    show_default=True,
    help="Read at most this much from each datanode in a second; 0 is no limit.",
)
@click.option(
    "--out",
    metavar="FILE",
    type=LocalPath(dir_okay=False, path_type=Path),
    help="Also write all results here; the same command continues an interrupted one.",
)
@click.option(
    "--after",
    type=WholeNumber(0, CONTAINER_ID_MAX),
    default=0,
    help="Without IDs: start after this container ID.",
)
@click.option(
    "--svg",
    metavar="FILE",
    type=LocalPath(dir_okay=False, path_type=Path),
    help=f"Draw the first {DRAWN_MAX} containers that are not equal; with --deep their windows.",
)
@agents_option
@json_option
@click.pass_obj
def diagnose(
    style: ProgressStyle,
    *,
    arguments: tuple[str, ...],
    cluster: str,
    deep: bool,
    rate: str,
    out: Path | None,
    after: int,
    agents: str,
    svg: Path | None,
    as_json: bool,
) -> None:
    """Compare the replicas of a running cluster; it needs no agents.

    Asks SCM for the containers, and each datanode for the trees of its replicas. Every
    closed container gets a verdict; UNKNOWN names the replicas that were not read, and
    why. Trees are as of the datanodes' last scans: with --deep the data are read over
    the network as well, and each window is checked against its record. Nothing changes.

    Where an agent runs on a datanode's host, it gives the trees, and with --deep it
    scans the data there, at its own rate: only damaged chunks cross the network.

    Erasure-coded containers are compared with --deep alone: each replica's data, and
    the checksums of their stripes. The result names the stripes that are not whole, the
    replica indexes that lack them, and whether the others still give all data.

    Without IDs it takes all containers; with `-` IDs come from standard input.

    \b
    Exit status:
      0  all closed containers are equal
      3  some differ or are damaged
      4  some are damaged beyond repair, as far as the replicas show
      5  nothing was found, and some could not be compared
      7  SCM is unreachable; or nothing was found, and a datanode did not answer
    """
    with command_result("diagnose", as_json=as_json) as answer:
        if arguments and after:
            raise UsageError("--after is for a diagnosis without IDs")
        try:
            limit = parse_rate(rate)
        except ValueError as error:
            raise UsageError(f"--rate: {error}") from error
        ids = sorted(map(ContainerId, container_ids(arguments))) if arguments else None
        with open_cluster(cluster) as directory, progress_sink(style) as sink:
            found = ClusterAgents(agents, client_config(os.environ))
            run = _Run(directory, ids, after, found, reads_data=deep)
            results = ResultsFile(out, Disk(), run.asked) if out else None
            run.diagnose(answer, sink, results, limit)
            answer.data = _summary(run.tally, run.asked) | {"agents": list(found.found)}
            for problem in found.problems:
                answer.warn(problem)
            if svg:
                Disk().replace(svg, run.picture().encode())
        answer.exit_status = answer.exit_status or run.tally.exit_status()
        if not as_json:
            _print_summary(run.tally, run.identity.cluster_id)


class _Run:
    """One diagnosis, from SCM's first answer to its summary."""

    def __init__(
        self,
        directory: ScmClient,
        ids: list[ContainerId] | None,
        after: int,
        agents: ClusterAgents,
        *,
        reads_data: bool,
    ) -> None:
        self._directory, self._ids, self._after, self._agents = directory, ids, after, agents
        self._reads_data = reads_data
        self.identity = directory.identity()
        self.tally = _Tally(last_id=after)
        self._drawn = list[DrawnDiagnosis]()

    def picture(self) -> str:
        """The SVG of what was found; results of an interrupted run are not in it."""
        counts = ", ".join(_counts(self.tally)) or "none closed"
        title = f"Cluster {self.identity.cluster_id}: {self.tally.containers} containers: {counts}"
        missing = len(self.tally.findings) - len(self._drawn)
        read = "All data were read." if self._reads_data else "As of the last scans."
        rest = f" {missing} further containers are not drawn." if missing else ""
        return draw_diagnoses(title, read + rest, self._drawn)

    def diagnose(
        self, answer: CommandResult, sink: ProgressSink, results: ResultsFile | None, limit: int
    ) -> None:
        """Diagnose what `results` do not have yet; print findings as they come."""
        if self.identity.in_safe_mode:
            answer.warn("SCM is in safe mode: it may not know all replicas yet")
        for result in results.results() if results else ():
            self.tally.add(result)
        total = len(self._ids) if self._ids else self.identity.container_count
        sink.begin("diagnosing", total, "containers")
        sink.skip(self.tally.containers)
        with ClusterSurvey(
            self._directory,
            open_datanode,
            limit,
            reads_data=self._reads_data,
            find_agent=self._agents.find,
        ) as survey:
            wanted = _containers(self._directory, self._ids, self.tally.last_id, answer)
            for batch in survey.diagnose(wanted):
                lines = [_result(one, deep=self._reads_data) for one in batch]
                if results:
                    results.add(lines)
                for line in lines:
                    self.tally.add(line)
                sink.advance(len(batch))
                shown = [one for one in batch if self._is_shown(one)]
                self._drawn += map(drawn_diagnosis, shown[: DRAWN_MAX - len(self._drawn)])
                if shown and not answer.as_json:
                    with sink.results():
                        for one in shown:
                            print_diagnosis(one)
                            print_line("")

    def _is_shown(self, diagnosis: Diagnosis) -> bool:
        return diagnosis.verdict is not Verdict.MATCH and not reason_not_compared(
            diagnosis.container, reads_data=self._reads_data
        )

    @property
    def asked(self) -> JsonObject:
        """What is asked of which cluster."""
        return {
            "clusterID": self.identity.cluster_id,
            "deep": self._reads_data,
            "ids": self._ids,
            "after": self._after,
        }


def _containers(
    directory: ScmClient, ids: list[ContainerId] | None, after: int, answer: CommandResult
) -> Iterator[ClusterContainer]:
    """The containers to diagnose, in ascending order."""
    if ids is None:
        yield from directory.containers(after)
        return
    wanted = [number for number in ids if number > after]
    found = directory.get_containers(wanted)
    for number in wanted:
        if number in found:
            yield found[number]
        else:
            answer.fail(
                "container_not_found",
                f"Container {number} is not known to SCM.",
                hint=UNKNOWN_CONTAINER_HINT,
            )


def _result(diagnosis: Diagnosis, *, deep: bool) -> JsonObject:
    """The line of a container; of an equal one its verdict alone."""
    number = diagnosis.container.container_id
    if reason_not_compared(diagnosis.container, reads_data=deep):
        return {"containerID": number, "verdict": _NOT_COMPARED, "doubt": diagnosis.doubt}
    if diagnosis.verdict is Verdict.MATCH:
        return {"containerID": number, "verdict": Verdict.MATCH.value}
    return diagnosis_json(diagnosis)


def _summary(tally: _Tally, asked: JsonObject) -> JsonObject:
    counts = {verdict.value: tally.verdicts[verdict.value] for verdict in Verdict}
    return {
        "clusterID": asked["clusterID"],
        "deep": asked["deep"],
        "containers": tally.containers,
        "verdicts": counts,
        "notCompared": tally.verdicts[_NOT_COMPARED],
        "findings": tally.findings,
        "moreFindings": tally.containers
        - counts[Verdict.MATCH.value]
        - tally.verdicts[_NOT_COMPARED]
        - len(tally.findings),
    }


def _counts(tally: _Tally) -> list[str]:
    return [
        f"{tally.verdicts[verdict.value]} {verdict.value}"
        for verdict in Verdict
        if tally.verdicts[verdict.value]
    ]


def _print_summary(tally: _Tally, cluster_id: str) -> None:
    counts = _counts(tally)
    skipped = tally.verdicts[_NOT_COMPARED]
    more = (
        f"; {skipped} were not compared: they are open, or erasure-coded and without --deep"
        if skipped
        else ""
    )
    print_line(
        f"cluster {cluster_id}: {tally.containers} containers: {', '.join(counts) or 'none closed'}"
        f"{more}"
    )
