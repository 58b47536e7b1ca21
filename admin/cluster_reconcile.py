"""`treefold reconcile --cluster`: Ozone's own reconciliation, watched to its end."""

import time
from collections.abc import Callable, Sequence
from functools import wraps

import click

from admin.answer import check_no_controller, container_ids
from admin.cluster_containers import listed_containers
from admin.cluster_plan import PlannedContainer, print_cluster_plan
from admin.clusters import UNKNOWN_CONTAINER_HINT, cluster_option, open_cluster
from admin.command_result import CommandResult, command_result
from admin.confirmation import is_confirmed
from admin.diagnosis_text import NodeNames
from admin.option_types import WholeNumber
from merkle.errors import ReconcileError
from merkle.tree import ContainerId, root_hex
from ozone.scm_client import ScmClient
from runtime.errors import UsageError
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject
from runtime.progress import ProgressStyle, progress_sink
from runtime.setting_values import parse_duration
from scm.container_reports import read_reports, ruling_of
from scm.eligibility import Eligibility, Ruling
from scm.ozone_driver import OzoneDriver
from scm.ozone_rounds import OzoneOutcome, OzoneRun
from scm.pace import PaceLimits
from scm.policy import RootComparison

# Datanodes report every 30 s by default (hdds.heartbeat.interval): a command and its
# report each wait for at most one heartbeat.
_SETTLE = "90s"
_PER_DATANODE = 2
# SCM tells nobody of reports: it is asked again, so often in a round's last wait.
_POLLS_OF_A_ROUND = 5
_POLL_S_MAX = 1.0
# A failover of SCM takes seconds; a restart less than this.
_SILENCE_MAX_S = 180.0
# Options that only a controller can serve.
_CONTROLLER_ONLY = ("status", "plan_file", "apply_file", "wait", "reason")
_NOT_CONVERGING_HINT = (
    "Ozone's reconciliation takes a chunk only whole, from a replica that has all of it. `treefold"
    " rescue ID --cluster ... --dry-run` shows what the replicas still have together."
)


def cluster_reconcile_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--cluster` and its limits; with it the command's own body is not run."""

    @cluster_option()
    @click.option(
        "--settle",
        metavar="DURATION",
        help="With --cluster: a round has ended when no root has changed for so long; more than"
        f" two heartbeats of the datanodes. [default: {_SETTLE}]",
    )
    @click.option(
        "--per-datanode",
        type=WholeNumber(1),
        help="With --cluster: containers under way at one datanode at a time."
        f" [default: {_PER_DATANODE}]",
    )
    @click.option(
        "--per-hour",
        type=WholeNumber(1),
        help="With --cluster: requests in an hour. [default: no limit]",
    )
    @wraps(command)
    def chosen(
        *,
        cluster: str | None,
        settle: str | None,
        per_datanode: int | None,
        per_hour: int | None,
        **options: object,
    ) -> None:
        has_limits = settle is not None or per_datanode is not None or per_hour is not None
        if cluster is None and not has_limits:
            command(**options)
            return
        with command_result("reconcile", as_json=bool(options["as_json"])) as answer:
            if cluster is None:
                raise UsageError("--settle, --per-datanode and --per-hour need --cluster")
            check_no_controller()
            for name in _CONTROLLER_ONLY:
                if options[name]:
                    option = name.removesuffix("_file")
                    raise UsageError(
                        f"--{option} needs a controller; with --cluster the command waits, and"
                        " `treefold container info --cluster` shows roots"
                    )
            try:
                settle_s = parse_duration(settle or _SETTLE)
            except ValueError as error:
                raise UsageError(f"--settle: {error}") from error
            if settle_s <= 0:
                raise UsageError(
                    "--settle: a round that ends at once has not begun",
                    hint="Give more than two heartbeats of the datanodes; they take 30 s each.",
                )
            limits = PaceLimits(per_datanode or _PER_DATANODE, per_hour or 0)
            arguments = options["arguments"]
            assert isinstance(arguments, tuple)
            with open_cluster(cluster) as scm:
                wanted = _requested(scm, arguments, all_diverged=bool(options["all_diverged"]))
                _Reconciliation(scm, answer, limits, settle_s).run(
                    wanted, dry_run=bool(options["dry_run"]), yes=bool(options["yes"])
                )

    return chosen


def _requested(
    scm: ScmClient, arguments: tuple[str, ...], *, all_diverged: bool
) -> list[ContainerId]:
    if not all_diverged:
        return [ContainerId(number) for number in container_ids(arguments)]
    if arguments:
        raise UsageError("give either container IDs or --all-diverged, not both")
    return [
        one.container.container_id
        for one in listed_containers(scm)
        if one.compared.comparison is RootComparison.DIVERGED and one.ruling.is_ok
    ]


class _Reconciliation:
    """One run of the command, from its plan to its results."""

    def __init__(
        self,
        scm: ScmClient,
        answer: CommandResult,
        limits: PaceLimits,
        settle_s: float,
    ) -> None:
        self._scm, self._answer = scm, answer
        # Short rounds need short waits.
        self._poll_s = min(_POLL_S_MAX, settle_s / _POLLS_OF_A_ROUND)
        self._driver = OzoneDriver(scm, limits, settle_s=settle_s)
        self._nodes = {node.peer: node for node in scm.nodes()}
        self._results = list[JsonObject]()

    def run(self, wanted: Sequence[ContainerId], *, dry_run: bool, yes: bool) -> None:
        """Show the plan, have it confirmed, request and watch."""
        if self._scm.identity().in_safe_mode:
            self._answer.warn("SCM is in safe mode: it may not know all replicas yet")
        reports = read_reports(self._scm, wanted)
        rulings = {number: ruling_of(number, reports.get(number)) for number in wanted}
        plan = [
            PlannedContainer.of_report(number, ruling, reports.get(number), self._nodes)
            for number, ruling in rulings.items()
        ]
        self._answer.data = {"plan": [one.json() for one in plan], "results": self._results}
        allowed = [number for number, ruling in rulings.items() if ruling.is_ok]
        if not self._answer.as_json:
            print_cluster_plan([one for one in plan if one.ruling.is_ok])
        for number, ruling in rulings.items():
            if not ruling.is_ok:
                self._refuse(number, ruling)
        if 0 < len(allowed) < len(rulings):
            self._answer.exit_status = ExitCode.PARTLY
        count = len(allowed)
        question = f"Have Ozone reconcile {count} container{'' if count == 1 else 's'}?"
        if allowed and not dry_run and is_confirmed(self._answer, question, yes=yes):
            self._watch(allowed)

    def _refuse(self, number: ContainerId, ruling: Ruling) -> None:
        message = NodeNames(self._nodes).text(ruling.message)
        is_unknown = ruling.eligibility is Eligibility.CONTAINER_NOT_FOUND
        hint = UNKNOWN_CONTAINER_HINT if is_unknown else ""
        self._answer.fail(ruling.eligibility.value.lower(), message, hint=hint)
        self._answer.exit_status = ExitCode.FAILED if is_unknown else ExitCode.REFUSED

    def _watch(self, allowed: Sequence[ContainerId]) -> None:
        style = click.get_current_context().obj or ProgressStyle()
        answered_s = time.monotonic()
        self._driver.add(allowed)
        with progress_sink(style) as sink:
            sink.begin("reconciling", len(allowed), "containers")
            while self._driver.runs:
                try:
                    ended = self._driver.poll(time.monotonic())
                    answered_s = time.monotonic()
                except ReconcileError as error:
                    silent_s = time.monotonic() - answered_s
                    if not error.retryable or silent_s > _SILENCE_MAX_S:
                        raise
                    ended = []
                sink.advance(len(ended))
                if ended:
                    with sink.results():
                        for run in ended:
                            self._note(run)
                if self._driver.runs:
                    # SCM tells of no change by itself. Ctrl-C ends the wait.
                    time.sleep(self._poll_s)

    def _note(self, run: OzoneRun) -> None:
        assert run.outcome is not None
        names = NodeNames(self._nodes)
        number, detail = run.container_id, names.text(run.detail)
        self._results.append(
            {
                "containerID": number,
                "outcome": run.outcome.value,
                "rounds": run.round,
                "detail": run.detail,
                "roots": {
                    peer: None if root is None else root_hex(root) for peer, root, _ in run.seen
                },
            }
        )
        rounds = f"{run.round} round{'' if run.round == 1 else 's'}"
        note = f" ({detail})" if detail else ""
        match run.outcome:
            case OzoneOutcome.EQUAL:
                self._answer.print(f"Container {number}: equal after {rounds}{note}")
                return
            case OzoneOutcome.NOT_CONVERGING:
                text = f"Container {number}: Ozone does not make its replicas equal: {detail}."
                self._answer.fail("not_converging", text, hint=_NOT_CONVERGING_HINT)
            case OzoneOutcome.UNKNOWN:
                text = f"Container {number}: whether its replicas are equal is not known: {detail}."
                self._answer.fail("unknown", text)
            case OzoneOutcome.REFUSED:
                self._answer.fail("refused", f"Container {number}: {detail}")
        self._answer.exit_status = ExitCode.PARTLY
