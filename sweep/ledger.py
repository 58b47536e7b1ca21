"""The replicas that a sweep expects, and what it may say where one was not read.

Expected are the replicas of the sweep before, those that it missed itself, and those in
the inventories of exports that were left out; less those whose removal an agent
reported. One that was missed stays expected even when the sweep that read it last is no
longer kept: nobody has looked at it since. Where SCM says how many replicas a container
must have, that many are expected, and one that was replaced elsewhere is not. Of a
container with an unread replica a sweep must not say that it is equal, healed or lost:
the replica that nobody read may be the damaged one, or the good one.

`unread_replicas` decides what was not read, `SettleStage` what may be said then.
`Ledger` finds what they need.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby

import pyarrow as pa
import pyarrow.compute as pc

from chunktable.manifest import manifest_sequence
from chunktable.reader import read_inventory
from merkle.checksum import fingerprint
from merkle.errors import ReconcileError
from merkle.outcome import Verdict
from runtime.errors import DiskError
from sweep.exact import Row
from sweep.exports import Exports, ForEach, open_export
from sweep.history import History, agent_events
from sweep.model import FINAL_VERDICT_SCHEMA, REPLICA_SCHEMA, UNSEEN_SCHEMA, NotCompared
from sweep.output import SkippedInput, SweepStore, SweepTable
from sweep.pieces import StoredTable
from sweep.work import SweepStage

_KEY = ["container_id", "datanode", "volume"]
# The columns of `roots` that SettleStage reads.
ROOT_KEYS = pa.schema([REPLICA_SCHEMA.field(name) for name in _KEY])
# Without the reason, which only the sweep that misses a replica knows.
EXPECTED_SCHEMA = pa.schema([field for field in UNSEEN_SCHEMA if field.name != "reason"])
# The newest report of an agent that it removed a replica.
REMOVED_SCHEMA = pa.schema(
    [UNSEEN_SCHEMA.field(name) for name in ("container_id", "datanode")]
    + [pa.field("time", UNSEEN_SCHEMA.field("since").type)]
)

# How many replicas a container must have, by SCM.
REQUIRED_SCHEMA = pa.schema(
    [UNSEEN_SCHEMA.field("container_id"), pa.field("required", pa.int32(), nullable=False)]
)

# Verdicts that hold whatever an unread replica has: the replicas that were read differ.
_HOLD = frozenset({Verdict.REPAIRABLE.value, Verdict.CONFLICT.value})

# Unread replicas named in the detail of a container.
_NAMED_MAX = 3


def unread_replicas(expected: pa.Table, replicas: pa.Table, removed: pa.Table) -> pa.Table:
    """The replicas of `expected` (EXPECTED_SCHEMA) that are not in `replicas` (columns
    container_id, datanode, volume) and were not removed (REMOVED_SCHEMA).

    A replica that was read on another volume of its datanode was moved. A removal
    counts from when the replica was last read: before, the replica was another one.
    """
    read = replicas.select(_KEY)
    unread = expected.join(read, _KEY, join_type="left anti")
    if not unread.num_rows:
        return EXPECTED_SCHEMA.empty_table()
    place = ["container_id", "datanode"]
    moved = read.join(expected.select(_KEY), _KEY, join_type="left anti").select(place)
    unread = unread.join(moved.group_by(place).aggregate([]), place, join_type="left anti")
    last = removed.group_by(place).aggregate([("time", "max")])
    unread = unread.join(last, place, join_type="left outer")
    is_removed = pc.fill_null(pc.greater_equal(unread["time_max"], unread["since"]), False)
    return unread.filter(pc.invert(is_removed)).select(EXPECTED_SCHEMA.names).cast(EXPECTED_SCHEMA)


def _with_required(
    unread: pa.Table, replicas: pa.Table, required: pa.Table, sweep_id: str
) -> pa.Table:
    """The replicas that were not read (UNSEEN_SCHEMA), where SCM requires a number of
    them (REQUIRED_SCHEMA) and some were read (columns container_id, datanode).

    If all required ones were read, others were replaced. If more are lacking than are
    known by their place, the rest is without one: datanode and volume are empty.
    """
    holders = replicas.group_by(["container_id", "datanode"]).aggregate([])
    counted = holders.group_by("container_id").aggregate([([], "count_all")])
    held = required.join(counted, "container_id", join_type="left outer")
    count = pc.fill_null(held["count_all"], 0)
    is_whole = pc.greater_equal(count, held["required"])
    replaced = pc.is_in(unread["container_id"], value_set=held.filter(is_whole)["container_id"])
    unread = unread.filter(pc.invert(replaced))
    lacking = held.set_column(held.column_names.index("count_all"), "count_all", count)
    placed = Counter(unread["container_id"].to_pylist())
    more = [
        {"container_id": row["container_id"], "datanode": "", "volume": "",
         "last_sweep": sweep_id, "since": None,
         "reason": f"SCM requires {row['required']} replicas, and {row['count_all']} were read"}
        for row in lacking.filter(pc.invert(is_whole)).to_pylist()
        for _ in range(row["required"] - row["count_all"] - placed[row["container_id"]])
    ]  # fmt: skip
    return pa.concat_tables([unread, pa.Table.from_pylist(more, UNSEEN_SCHEMA)])


def _with_unread(verdicts: pa.Table, unread: pa.Table) -> pa.Table:
    """The final verdicts (FINAL_VERDICT_SCHEMA, by container) of these containers
    (VERDICT_SCHEMA) and of those with `unread` replicas (UNSEEN_SCHEMA).
    """
    ordered = unread.sort_by([(name, "ascending") for name in _KEY]).select([*_KEY, "reason"])
    by_container = {
        container_id: list(group)
        for container_id, group in groupby(ordered.to_pylist(), lambda row: row["container_id"])
    }
    has_unread = pc.is_in(
        verdicts["container_id"], value_set=pa.array(list(by_container), pa.int64())
    )
    whole = verdicts.filter(pc.invert(has_unread))
    whole = whole.append_column(
        FINAL_VERDICT_SCHEMA.field("unread"),
        pa.repeat(pa.scalar(0, pa.int32()), whole.num_rows),
    )
    changed = [
        _unseen(row, by_container.pop(row["container_id"]))
        for row in verdicts.filter(has_unread).to_pylist()
    ]
    nothing = {"verdict": NotCompared.UNSEEN.value, "replicas": 0, "excluded": 0, "detail": ""}
    changed += [
        _unseen(nothing | {"container_id": container_id}, rows)
        for container_id, rows in by_container.items()
    ]
    changed_rows = pa.Table.from_pylist(changed, FINAL_VERDICT_SCHEMA)
    return pa.concat_tables([whole.cast(FINAL_VERDICT_SCHEMA), changed_rows]).sort_by(
        "container_id"
    )


def _unseen(verdict: Row, unread: Sequence[Row]) -> Row:
    """A row of FINAL_VERDICT_SCHEMA for a container with unread replicas."""
    text = (
        f"{len(unread)} of {len(unread) + verdict['replicas']} expected replicas"
        f" {'was' if len(unread) == 1 else 'were'} not read: "
    )
    text += "; ".join(
        f"{row['datanode']}{row['volume'] and '/'}{row['volume']}{row['datanode'] and ': '}"
        f"{row['reason']}"
        for row in unread[:_NAMED_MAX]
    )
    if len(unread) > _NAMED_MAX:
        text += f"; and {len(unread) - _NAMED_MAX} more"
    if verdict["detail"]:
        text += f". Of those that were read: {verdict['detail']}"
    row = {**verdict, "detail": text, "unread": len(unread)}
    if verdict["verdict"] not in _HOLD:
        row |= {"verdict": NotCompared.UNSEEN.value, "diverged": False}
    return row


@dataclass(frozen=True, slots=True)
class ReadPlaces:
    """What a sweep read: the volumes that it read whole, as (datanode, volume), all
    datanodes with a replica or a volume, and the inputs that were skipped.
    """

    volumes: frozenset[tuple[str, str]]
    datanodes: frozenset[str]
    skipped: tuple[SkippedInput, ...]
    # Datanodes whose agents' events cannot be read.
    without_events: frozenset[str] = frozenset()

    def why_unread(self, datanode: str, volume: str) -> str:
        """Why a replica in this place was not read."""
        if (datanode, volume) in self.volumes:
            if datanode in self.without_events:
                return "its volume does not hold it, and its agent's events cannot be read"
            return "its volume was read and does not hold it, and no agent reported its removal"
        named = [one for one in self.skipped if datanode in one.input.split("/")]
        if not named and len(self.skipped) == 1:
            named = list(self.skipped)
        if named:
            return f"{named[0].input}: {named[0].reason}"
        what = "volume" if datanode in self.datanodes else "datanode"
        skipped = f" ({len(self.skipped)} were skipped)" if self.skipped else ""
        return f"no input that was read has this {what}{skipped}"


class Ledger:
    """The replicas expected of one sweep."""

    def __init__(
        self,
        output: SweepStore,
        history: History,
        sweep_id: str,
        required: pa.Table | None,
        for_each: ForEach,
    ) -> None:
        """Find the newest earlier sweep whose tables can be read. `required` is what
        SCM says of containers (REQUIRED_SCHEMA). Manifests are read by `for_each`.
        """
        self._for_each = for_each
        self._sweep_id = sweep_id
        self._required = REQUIRED_SCHEMA.empty_table() if required is None else required
        self._notes = list[str]()
        self._earlier = [name for name in output.sweeps() if name < sweep_id]
        self._previous = self._newest_readable(output)
        self._since = dict[tuple[str, str], datetime]()
        self._removed = REMOVED_SCHEMA.empty_table()
        self._left_out = EXPECTED_SCHEMA.empty_table()
        self._tables = dict[str, StoredTable]()
        self._started_at: datetime | None = None
        # Datanodes whose agents' events cannot be read.
        self.without_events = frozenset[str]()
        if self._previous is not None:
            self._tables = {
                "known": output.stored(SweepTable.ROOTS, self._previous, ROOT_KEYS),
                "missed": output.stored(SweepTable.UNSEEN, self._previous, EXPECTED_SCHEMA),
            }
            self._load_times(output, history, self._previous)

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be read of earlier sweeps."""
        return tuple(self._notes)

    def add_exports(self, exports: Exports, skipped: Iterable[SkippedInput]) -> None:
        """Take in what agents removed, by the exports that were read; and expect the
        replicas that those list that were left out.
        """
        told = agent_events(exports)
        events, self.without_events = told.events, told.lost
        is_whole = pc.and_(pc.equal(events["kind"], "delete"), pc.is_null(events["block_id"]))
        self._removed = events.filter(is_whole).select(REMOVED_SCHEMA.names).cast(REMOVED_SCHEMA)
        listed = [EXPECTED_SCHEMA.empty_table()]
        for one in skipped:
            if manifest_sequence(one.input.partition("?")[0].rpartition("/")[2]) is None:
                continue
            try:
                filesystem, folder, manifest = open_export(one.input)
                inventory = read_inventory(filesystem, folder, manifest)
            except ReconcileError:
                # It is skipped, and only the sweep before can tell what it holds.
                continue
            constants = {
                "datanode": manifest.datanode,
                "last_sweep": self._sweep_id,
                "since": manifest.begun_at,
            }
            columns = {name: inventory[name] for name in ("container_id", "volume")} | {
                name: pa.repeat(
                    pa.scalar(value, EXPECTED_SCHEMA.field(name).type), inventory.num_rows
                )
                for name, value in constants.items()
            }
            listed.append(pa.table({n: columns[n] for n in EXPECTED_SCHEMA.names}, EXPECTED_SCHEMA))
        self._left_out = pa.concat_tables(listed)

    def stage(self, places: ReadPlaces, gone: Iterable[str]) -> "SettleStage":
        """The stage that settles the verdicts of this sweep. Its inputs are `roots` and
        `judged` of this sweep, and the tables `known`, `missed`, `removed`,
        `left_out` and `required` of `inputs`.

        `gone` are datanodes, DATANODE/VOLUME, or container=ID, that were removed on
        purpose.
        """
        return SettleStage(
            places,
            frozenset(gone),
            self._sweep_id,
            self._previous,
            dict(self._since),
            self._started_at,
        )

    def key(self, gone: Iterable[str]) -> str:
        """What may differ between two runs of one sweep: the command that resumes it
        may declare more replicas as gone, and SCM may require another number of them.
        """
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_stream(buffer, REQUIRED_SCHEMA) as stream:
            stream.write_table(self._required)
        required = fingerprint(buffer.getvalue().to_pybytes()).hex()
        return ",".join((*sorted(gone), required))

    @property
    def expects_any(self) -> bool:
        """Whether an earlier sweep, an export that was left out, or SCM expects any
        replicas.
        """
        return bool(self._tables) or any(one.num_rows for one in (self._left_out, self._required))

    def inputs(self, stage: SweepStage) -> Mapping[str, StoredTable]:
        """The inputs of `stage` that earlier sweeps and exports hold; what is in memory
        is stored in a stage of the work folder first.

        Raises:
            DiskError: it cannot be stored.
        """
        stage.clear()
        held = {"removed": self._removed, "left_out": self._left_out, "required": self._required}
        stage.add({}, held)
        return {
            **self._tables,
            "required": stage.table("required", REQUIRED_SCHEMA),
            "removed": stage.table("removed", REMOVED_SCHEMA),
            "left_out": stage.table("left_out", EXPECTED_SCHEMA),
        }

    def _newest_readable(self, output: SweepStore) -> str | None:
        damaged = list[str]()
        for name in reversed(self._earlier):
            try:
                for table, columns in (
                    (SweepTable.ROOTS, _KEY),
                    (SweepTable.UNSEEN, EXPECTED_SCHEMA.names),
                ):
                    for _ in output.pieces(table, name, columns):
                        pass
            except DiskError as error:
                damaged.append(f"the replicas that sweep {name} had are unknown: {error.message}")
                continue
            self._notes += [f"{text}; those of {name} are expected instead" for text in damaged]
            return name
        self._notes += [f"{text}; an unread replica may go unnoticed" for text in damaged]
        return None

    def _load_times(self, output: SweepStore, history: History, previous: str) -> None:
        """When reading each volume began in the sweep before. What cannot be read has a
        note already: silent changes need it too.
        """
        with suppress(DiskError, ValueError, KeyError):
            exports, _ = history.exports(previous, self._for_each)
            self._started_at = datetime.fromisoformat(str(output.summary(previous)["startedAt"]))
            for one in exports:
                self._since |= {(one.datanode, v): one.begun_at for v in one.volumes}


@dataclass(frozen=True, slots=True)
class SettleStage:
    """Settles the verdicts of containers with expected replicas that were not read
    (sweep.stages.ContainerStage; see Ledger for its inputs). Where none are expected,
    `judged` is enough.

    Outputs: `verdicts` (FINAL_VERDICT_SCHEMA, by container) and `unseen`
    (UNSEEN_SCHEMA), the unread replicas with the reason.
    """

    places: ReadPlaces
    gone: frozenset[str]
    sweep_id: str
    # The sweep that `known` and `missed` are of.
    previous: str | None
    # When reading a (datanode, volume) began in that sweep, and when the sweep began.
    since: Mapping[tuple[str, str], datetime]
    started_at: datetime | None

    @property
    def schemas(self) -> Mapping[str, pa.Schema]:
        """See ContainerStage."""
        return {"verdicts": FINAL_VERDICT_SCHEMA, "unseen": UNSEEN_SCHEMA}

    def __call__(self, tables: Mapping[str, pa.Table]) -> Mapping[str, pa.Table]:
        """See ContainerStage."""
        found = list[Row]()
        if "roots" not in tables:
            unseen = UNSEEN_SCHEMA.empty_table()
            return {"verdicts": _with_unread(tables["judged"], unseen), "unseen": unseen}
        unread = unread_replicas(self._expected(tables), tables["roots"], tables["removed"])
        for row in unread.to_pylist():
            datanode, volume = row["datanode"], row["volume"]
            names = {datanode, f"{datanode}/{volume}", f"container={row['container_id']}"}
            if not names & self.gone:
                found.append(row | {"reason": self.places.why_unread(datanode, volume)})
        required = tables["required"]
        numbers = (name.removeprefix("container=") for name in self.gone if "=" in name)
        gone_ids = pa.array([int(number) for number in numbers if number.isdecimal()], pa.int64())
        is_gone = pc.is_in(required["container_id"], value_set=gone_ids)
        unseen = _with_required(
            pa.Table.from_pylist(found, UNSEEN_SCHEMA),
            tables["roots"],
            required.filter(pc.invert(is_gone)),
            self.sweep_id,
        )
        return {"verdicts": _with_unread(tables["judged"], unseen), "unseen": unseen}

    def _expected(self, tables: Mapping[str, pa.Table]) -> pa.Table:
        left_out = tables["left_out"]
        if self.previous is None:
            return left_out
        roots, missed = tables["known"], tables["missed"]
        # Only SCM said that they are lacking, and says so again if they still are.
        missed = missed.filter(pc.not_equal(missed["datanode"], ""))
        places = roots.select(["datanode", "volume"]).group_by(["datanode", "volume"]).aggregate([])
        since = pa.array(
            [
                self.since.get((row["datanode"], row["volume"]), self.started_at)
                for row in places.to_pylist()
            ],
            EXPECTED_SCHEMA.field("since").type,
        )
        last = pa.repeat(pa.scalar(self.previous), roots.num_rows)
        roots = roots.join(places.append_column("since", since), ["datanode", "volume"])
        roots = roots.append_column("last_sweep", last).select(EXPECTED_SCHEMA.names)
        before = pa.concat_tables([roots.cast(EXPECTED_SCHEMA), missed.cast(EXPECTED_SCHEMA)])
        more = left_out.join(before.select(_KEY), _KEY, join_type="left anti")
        return pa.concat_tables([before, more.cast(EXPECTED_SCHEMA)])
