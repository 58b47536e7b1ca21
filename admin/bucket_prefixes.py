"""`treefold bucket prefixes`: which keys of a replication cross, also while it runs."""

from collections.abc import Sequence

import click

from admin.bucket_pair import open_target
from admin.bucket_policies import (
    changes_replication,
    dry_run_option,
    print_wanted,
    yes_option,
)
from admin.command_result import command_result
from admin.confirmation import is_confirmed
from admin.replication_output import condition_text, view_json
from replicator.master.client import MasterClient
from replicator.master.messages import policy_id_from, prefixes_from
from replicator.prechecks import Precheck
from replicator.stores.port import Store
from replicator.syncer.prefixes import ALL, covers, uncovered
from runtime.errors import UsageError
from runtime.exit_codes import ExitCode


@click.command(short_help="Choose which keys of a replication cross.")
@click.option(
    "--prefix",
    "wanted",
    metavar="P",
    multiple=True,
    help="Only keys that begin with P; may be given several times.",
)
@click.option("--all", "wants_all", is_flag=True, help="All keys.")
@click.option(
    "--allow-nonempty",
    is_flag=True,
    help="Also where the target has other objects, which may be overwritten or deleted.",
)
@dry_run_option
@yes_option
@changes_replication
def prefixes(
    *,
    master: MasterClient,
    policy_id: str,
    wanted: tuple[str, ...],
    wants_all: bool,
    allow_nonempty: bool,
    dry_run: bool,
    reason: str,
    yes: bool,
    as_json: bool,
) -> None:
    """Replicate just the keys that begin with one of these prefixes, from now on.

    Keys that are added are compared and copied, while the others are followed. Keys
    that cross no more stay at the target as they are.

    \b
    Exit status:
      0  ordered, or so already; 1 failed, 2 usage
      6  refused: the target has objects below a prefix that is added, or the
         replication was cancelled, failed over or is a way back; or not confirmed
      7  the target or the master does not answer
    """
    with command_result("bucket prefixes", as_json=as_json) as answer:
        if wants_all == bool(wanted):
            raise UsageError("expected either --prefix, once or more often, or --all")
        known = policy_id_from(policy_id)
        after = prefixes_from(sorted(set(wanted)))
        view = master.replication(known)
        before = view.record.policy.prefixes
        added, removed = uncovered(after, before or ALL), uncovered(before, after or ALL)
        answer.data = {
            "replication": view_json(view),
            "added": list(added),
            "removed": list(removed),
        }
        if before == after:
            answer.print(f"replication {known}: these are its prefixes already")
            return
        answer.print(f"Change the keys of replication {known}, {condition_text(view)}:")
        for what, found, others in (
            ("copy and follow", added, before),
            ("follow no more", removed, after),
        ):
            for one in found:
                answer.print(f"  {what}: {_keys_text(one, others)}")
        with open_target(view.record.policy.target, may_write=False, is_trial=True) as target:
            other = _other_key(target, added, before or ALL)
        if other is not None:
            text = f"the target has objects that may be overwritten or deleted, such as {other}"
            if not allow_nonempty:
                answer.fail(f"precheck_{Precheck.TARGET_EMPTY.value}", text)
                answer.exit_status = ExitCode.REFUSED
                return
            answer.warn(text)
        if dry_run or not is_confirmed(answer, "Change these keys?", yes=yes):
            return
        print_wanted(answer, master.set_prefixes(known, after, reason))


def _keys_text(prefix: str, others: Sequence[str]) -> str:
    """The keys below a prefix, but for those below others of which it is the start."""
    scope = f"keys below {prefix}" if prefix else "keys"
    if any(one.startswith(prefix) for one in others):
        return f"all other {scope}"
    return f"all {scope}"


def _other_key(target: Store, added: Sequence[str], known: Sequence[str]) -> str | None:
    """A key of the target below what is added, beside what is replicated already."""
    for prefix in added:
        for facts in target.lister.list_objects(prefix):
            if not covers(known, facts.key):
                return facts.key
    return None
