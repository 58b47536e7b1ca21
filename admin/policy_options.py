"""The options of a replication, for the commands that begin and change one."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import wraps

import click

from admin.option_types import Fraction, WholeNumber
from admin.tls_options import check_option_address
from merkle.errors import ReconcileError
from replicator.master.client import MasterClient
from replicator.prechecks import Precheck, PrecheckFinding
from replicator.replication import ReplicationOptions
from replicator.syncer.target_verifier import described, follower_client
from replicator.verifier.client import VerifierUnavailableError
from runtime.errors import UsageError
from runtime.setting_values import parse_rate

_DEFAULTS = ReplicationOptions()


def policy_options(*, is_new: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of a policy, as those of a command that begins a replication, or
    changes one. The command gets as `given` the fields of ReplicationOptions that were
    named, and as `allow_silent` whether the verifier need not answer.
    """

    def added(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_options(*, no_verifier: bool = False, **values: object) -> None:
            given = {one.name: values.pop(one.name) for one in fields(ReplicationOptions)}
            rate, verifier = given["bytes_per_second"], given["verifier"]
            if isinstance(rate, str):
                given["bytes_per_second"] = rate_of(rate)
            if isinstance(verifier, str):
                if no_verifier:
                    raise UsageError("expected either --verifier or --no-verifier")
                check_option_address("--verifier", verifier)
            if no_verifier:
                given["verifier"] = ""
            named = {name: value for name, value in given.items() if value is not None}
            command(given=named, **values)

        found: Callable[..., None] = with_options
        flags = _flags(lambda default: str(default) if is_new else False)
        for flag in reversed(flags if is_new else [*flags, _NO_VERIFIER]):
            found = flag(found)
        return found

    return added


_NO_VERIFIER = click.option("--no-verifier", is_flag=True, help="Go on without a verifier.")


def _flags(default: Callable[[object], str | bool]) -> list[Callable[..., Callable[..., None]]]:
    """One for each field of ReplicationOptions, and --allow-silent; None where it is
    not given. `default` makes what help shows of a default.
    """
    return [
        click.option(
            "--rate",
            "bytes_per_second",
            metavar="RATE",
            show_default=default("no limit"),
            help='The most bytes of objects per second, such as "20MiB/s"; 0 is no limit.',
        ),
        click.option(
            "--queue-entries",
            "queue_entries_max",
            type=WholeNumber(1, 1_000_000_000),
            show_default=default(_DEFAULTS.queue_entries_max),
            help="Changes that may wait at the syncer; the source's log waits beyond.",
        ),
        click.option(
            "--interval",
            "interval_s",
            type=Fraction(0.1, 31_536_000),
            show_default=default(_DEFAULTS.interval_s),
            help="Seconds between two rounds, where the log is not followed.",
        ),
        click.option(
            "--live/--no-live",
            "is_live",
            default=None,
            show_default=default("live"),
            help="Follow the log.",
        ),
        click.option(
            "--newest-wins/--no-newest-wins",
            default=None,
            show_default=default("no-newest-wins"),
            help="Where the target has a newer object of a key, leave it.",
        ),
        click.option(
            "--acls/--no-acls",
            "keeps_acls",
            default=None,
            show_default=default("acls"),
            help="Copy ACLs of objects.",
        ),
        click.option(
            "--verifier",
            metavar="HOST:PORT",
            help=(
                "The verifier beside the target, as the syncer reaches it: small writes cross in"
                " batches, and comparisons by some bytes for each difference."
            ),
        ),
        click.option(
            "--allow-silent",
            is_flag=True,
            help="Also where the verifier does not answer this command.",
        ),
    ]


def chosen(given: Mapping[str, object], options: ReplicationOptions) -> ReplicationOptions:
    """These options with what was given instead."""
    values = asdict(options)
    values.update(given)
    return ReplicationOptions(**values)


def rate_of(text: str) -> int:
    """Bytes per second; 0 is no limit.

    Raises:
        UsageError: it is no rate.
    """
    try:
        return parse_rate(int(text) if text.isascii() and text.isdigit() else text)
    except ValueError as error:
        raise UsageError(f"--rate: {error}") from error


def verifier_findings(
    given: Mapping[str, object], target: str, master: MasterClient, *, allow_silent: bool
) -> Iterator[PrecheckFinding]:
    """What speaks against the verifier that is named, if one is, by what it answers. It
    is asked by the certificate that the master is asked by.
    """
    address = given.get("verifier")
    if not isinstance(address, str) or not address:
        return
    try:
        with follower_client(address, tls=master.tls, insecure=master.insecure) as client:
            described(client, target)
    except VerifierUnavailableError as error:
        text = f"the verifier does not answer: {error.message}"
        yield PrecheckFinding(Precheck.VERIFIER, not allow_silent, text)
    except ReconcileError as error:
        text = f"{error.message}. {error.hint}".rstrip(". ")
        yield PrecheckFinding(Precheck.VERIFIER, True, text)
