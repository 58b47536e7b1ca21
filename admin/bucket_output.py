"""What `treefold bucket` prints: documents with --json, lines for people without."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime

import click

from admin.bucket_pair import OpenPair
from proof.item import EvidenceLevel
from replicator.ledger import PlannedStep
from replicator.stores.capabilities import Capabilities
from replicator.sync import SyncPlan, SyncReport
from replicator.verify import Damage, VerificationTally, VerifiedKey
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject, print_json, print_line, print_table, size_text

# Failures, steps and differences that are printed for people; --json has all.
_LINES_SHOWN = 50
LEVELS = {level.name.lower(): level for level in EvidenceLevel}
_LEVEL_WORDS = {
    EvidenceLevel.LISTED: "by listing",
    EvidenceLevel.RECORDED: "by recorded hashes",
    EvidenceLevel.READ: "by reading both sides",
}
_DAMAGE_TEXTS = {
    None: "",
    Damage.SOURCE: " (at the source)",
    Damage.TARGET: " (at the target; the next sync replaces it)",
    Damage.BOTH: " (at both sides)",
}
HIDDEN_KEYS = "A side does not list all keys: equality cannot be shown."
_GROUP_NAMES = {"acl": "ACLs", "headers": "content headers", "tags": "tags"}


def plan_text(plan: SyncPlan) -> str:
    """A plan in one line."""
    return (
        f"plan: copy {plan.copies}, patch {plan.patches}, change properties of {plan.properties},"
        f" delete {plan.deletes}; at most {size_text(plan.bytes)} of objects. Equal: {plan.equal},"
        f" at the target only: {plan.extras}"
    )


def print_plan(steps: Iterable[PlannedStep], plan: SyncPlan, *, as_json: bool) -> None:
    """The steps of a plan, and its sums."""
    for number, step in enumerate(steps):
        if as_json:
            document: JsonObject = {"action": step.action, "key": step.key}
            print_json({**document, "bytes": step.length_bytes, "reason": step.reason})
        elif number < _LINES_SHOWN:
            print_line(f"{step.action:10} {step.key} ({step.reason})")
        elif number == _LINES_SHOWN:
            print_line("... and more; --json prints all")
    if as_json:
        names = ("copies", "patches", "properties", "deletes", "extras", "equal", "bytes")
        print_json({"dryRun": True, **{name: getattr(plan, name) for name in names}})
    else:
        print_line(plan_text(plan))


def plan_warnings(plan: SyncPlan, prefix: str) -> list[str]:
    """What should be looked at before a plan is carried out: it deletes all that the
    target has, because the source has nothing.
    """
    if not plan.deletes or plan.objects:
        return []
    where = f" with a key that begins with {prefix!r}" if prefix else ""
    return [
        f"warning: the source has no object{where}; --delete removes all of the target's"
        f" ({plan.deletes}). Is the address of the source right?"
    ]


def print_report(
    report: SyncReport, plan: SyncPlan, prefix: str, *, lists_all: bool, as_json: bool
) -> None:
    """The outcome of a sync."""
    if as_json:
        print_json(report.document())
        return
    extras = plan.extras
    for one in report.failed[:_LINES_SHOWN]:
        print_line(f"failed     {one.key}: {one.reason}: {one.detail}")
    if report.failed_count > _LINES_SHOWN:
        print_line(f"... {report.failed_count} failed in all; --json names them")
    print_line(
        f"copied {report.copied} ({size_text(report.bytes)}), properties of"
        f" {report.metadata_only}, deleted {report.deleted}, failed {report.failed_count}"
    )
    if report.equal:
        print_line(f"equal at level {report.level}, root {report.root}", style="green")
        if not plan.objects:
            print_line(nothing_text(prefix))
        elif report.level == "listed":
            print_line(
                "Some contents were not compared: both sides have no hash of them in common."
                " `treefold bucket verify --level read` reads them."
            )
        return
    if report.differences:
        print_line(f"not equal: {counted(report.differences, 'difference')}", style="red")
    if report.in_flight:
        keys = counted(report.in_flight, "key")
        print_line(f"{keys} changed while both sides were compared: run it again")
    if extras:
        are = "exists" if extras == 1 else "exist"
        print_line(f"{counted(extras, 'object')} {are} at the target only; see --delete")
    if not lists_all:
        print_line(f"{'' if report.differences else 'unknown: '}a side does not list all keys")


def print_key(key: VerifiedKey, number: int, show: Callable[[str], None], *, as_json: bool) -> None:
    """A key that differs or changed meanwhile, the `number`th from 1; `show` prints
    lines for people. What changed is no difference: `as_json` it goes to stderr.
    """
    if as_json and key.kind is not None:
        document: JsonObject = {"kind": key.kind.value, "key": key.key}
        print_json({**document, "level": key.level.name.lower()})
        return
    if as_json:
        print_line(f"in flight: {key.key}", stderr=True)
    elif number <= _LINES_SHOWN:
        kind = key.kind.value if key.kind else "in flight"
        show(f"{kind:10} {key.key}{_DAMAGE_TEXTS[key.damage]}")
    elif number == _LINES_SHOWN + 1:
        show("... and more; --json prints all")


def print_verification(
    tally: VerificationTally,
    pair: OpenPair,
    notes: Sequence[str],
    *,
    lists_all: bool,
    as_json: bool,
) -> None:
    """The outcome of a verification, and what it does not show; with `as_json` the
    latter goes to stderr. What crossed is counted at the target, or at the source where
    the target is on this machine.
    """
    far, name = (pair.target, "target") if pair.target.traffic else (pair.source, "source")
    traffic = far.traffic() if far.traffic else None
    if as_json:
        for note in notes:
            click.echo(note, err=True)
        print_json(
            {
                "equal": tally.is_equal and lists_all,
                "objects": tally.objects,
                "differences": tally.differences,
                "inFlight": tally.unsettled,
                "bytesCrossed": traffic.bytes if traffic else 0,
                "roundTrips": traffic.requests if traffic else 0,
                "levels": {name: tally.levels[level] for name, level in LEVELS.items()},
                "oldestReadAt": time_text(tally.sets.oldest_read_at_s),
            }
        )
        return
    print_line(levels_text(tally.objects, tally.levels, tally.sets.oldest_read_at_s))
    if traffic is not None:
        print_line(
            f"{size_text(traffic.bytes)} to and from the {name} in {traffic.requests} requests"
        )
    if tally.differences:
        kinds = {kind.value: number for kind, number in tally.kinds.items()}
        print_line(not_equal_text(tally.differences, kinds), style="red")
    elif tally.unsettled or not lists_all:
        print_line("unknown whether they are equal", style="yellow")
    else:
        print_line(f"equal: root {tally.sets.root.total:032x}", style="green")
    for note in notes:
        print_line(note)


def levels_text(
    objects: int, levels: Mapping[EvidenceLevel, int], oldest_read_at_s: int | None
) -> str:
    """How many keys were compared, and how they are known."""
    known = ", ".join(f"{n} {_LEVEL_WORDS[level]}" for level, n in sorted(levels.items()) if n)
    text = f"{counted(objects, 'key')} compared" + (f": {known}" if known else "")
    if oldest_read_at_s is not None:
        text += f"; no read is older than {time_text(oldest_read_at_s)}"
    return text


def not_equal_text(differences: int, kinds: Mapping[str, int]) -> str:
    """How many keys differ, by the names of how."""
    named = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()) if number)
    return f"not equal: {counted(differences, 'difference')} ({named})"


def nothing_text(prefix: str) -> str:
    """What it means that no key was compared."""
    if prefix:
        return f"At neither side a key begins with {prefix!r}."
    return "Both sides are empty."


def uncompared_notes(groups: Sequence[str]) -> list[str]:
    """Which properties were not compared, where only those of these groups were."""
    lost = [text for name, text in _GROUP_NAMES.items() if name not in groups]
    if not lost:
        return []
    return [f"Not compared, as a side does not keep or show them: {', '.join(lost)}."]


def time_text(time_s: int | None) -> str | None:
    """A time in seconds since 1970, as reports write it."""
    if time_s is None:
        return None
    return datetime.fromtimestamp(time_s, UTC).isoformat().replace("+00:00", "Z")


def verification_notes(
    tally: VerificationTally,
    level: EvidenceLevel,
    groups: Sequence[str],
    prefix: str,
    *,
    lists_all: bool,
) -> list[str]:
    """What a verification does not show, in sentences."""
    if not tally.objects and lists_all:
        return [nothing_text(prefix)]
    notes = list[str]()
    if tally.unsettled:
        notes.append(f"{counted(tally.unsettled, 'key')} changed while they were compared.")
    if not lists_all:
        notes.append(HIDDEN_KEYS)
    if level is EvidenceLevel.LISTED:
        return [*notes, "Contents, metadata and tags were not compared; see --level."]
    if level is EvidenceLevel.RECORDED:
        if unhashed := tally.sets.levels[EvidenceLevel.LISTED]:
            notes.append(
                f"Of {counted(unhashed, 'equal key')} both sides have no hash in common: only"
                " sizes and properties were compared."
            )
        notes.append(
            "The target was not read: damage behind its own index is found by --level read only."
        )
    return notes + uncompared_notes(groups)


def print_capabilities(
    source: Capabilities, target: Capabilities, limitations: Sequence[str], *, as_json: bool
) -> None:
    """What both stores can do, why not, and what follows from that."""
    sides = {"source": source, "target": target}
    names = [name for name in Capabilities.__dataclass_fields__ if name != "reasons"]
    if as_json:
        documents = {
            side: {
                **{name: getattr(one, name) for name in names},
                "reasons": dict(one.reasons),
            }
            for side, one in sides.items()
        }
        print_json({**documents, "limitations": list(limitations)})
        return
    rows = [
        (name, *(_capability_text(getattr(one, name)) for one in sides.values())) for name in names
    ]
    print_table(("capability", "source", "target"), rows, folded=("source", "target"))
    for side, one in sides.items():
        for name, reason in one.reasons:
            print_line(f"{side}, {name}: {reason}")
    for limitation in limitations:
        print_line(f"note: {limitation}")
    if not limitations:
        print_line("everything crosses, and every write is guarded", style="green")


def _capability_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text or "none"


def counted(count: int, noun: str) -> str:
    """A number of things."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def end_compared(differences: int, *, is_equal: bool, failed: int = 0) -> None:
    """Exit as an outcome requires. Without differences it may be unknown whether the
    sides are equal.
    """
    if differences and not failed:
        raise click.exceptions.Exit(ExitCode.FINDINGS)
    if failed or not is_equal:
        raise click.exceptions.Exit(ExitCode.PARTLY)
