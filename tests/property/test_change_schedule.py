"""Whatever runs in parallel, the changes of each key take effect in their order."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from replicator.stores.port import Change, ChangeKind
from replicator.syncer.queue import QueuedChange
from replicator.syncer.schedule import ChangeSchedule, Work

KEYS = ("a", "d/a", "d/b", "d/e/a", "e/a")
PREFIXES = ("d/", "d/e/", "e/")
changes = st.one_of(
    st.builds(
        lambda key, kind: Change(1, key, "", kind),
        st.sampled_from(KEYS),
        st.sampled_from([ChangeKind.PUT, ChangeKind.DELETE]),
    ),
    st.builds(
        lambda pair: Change(1, pair[1], "", ChangeKind.RENAME, pair[0]),
        st.permutations(KEYS),
    ),
    st.builds(lambda one: Change(1, one, "", ChangeKind.DELETE_PREFIX), st.sampled_from(PREFIXES)),
    st.builds(
        lambda pair: Change(1, pair[1], "", ChangeKind.RENAME_PREFIX, pair[0]),
        st.permutations(PREFIXES),
    ),
)


def applied(log: list[Change], key: str) -> list[Change]:
    """What touches a key, without changes that a later one of the key replaces."""
    touching = [one for one in log if Work(one, [], 0, (0, 0)).touches(key)]
    kept = list[Change]()
    for one in touching:
        if kept and {one.kind, kept[-1].kind} <= {ChangeKind.PUT, ChangeKind.DELETE}:
            kept.pop()
        kept.append(one)
    return kept


@given(st.lists(changes, max_size=14), st.randoms(use_true_random=False))
def test_each_key_sees_its_changes_in_order(log: list[Change], chance: random.Random) -> None:
    """OZ-070, OZ-084."""
    schedule, running, order = ChangeSchedule(), list[Work](), list[Change]()
    added, merged = 0, set[int]()
    while added < len(log) or len(schedule):
        match chance.randrange(3):
            case 0 if added < len(log):
                added += 1
                schedule.add(QueuedChange(added, log[added - 1]), now_ms=added)
            case 1:
                running += schedule.start(chance.randrange(3))
            case _ if running:
                work = running.pop(chance.randrange(len(running)))
                order.append(work.change)
                merged.update(work.numbers[:-1])
                schedule.finish(work)
            case _:
                pass
        names = [one for one in running if not one.is_prefix]
        keys = [name for one in names for name in one.names]
        assert len(keys) == len(set(keys))
        assert not any(one.touches(key) for one in running if one.is_prefix for key in keys)
    assert schedule.done_through == len(log)
    assert schedule.merged == len(merged)
    for key in KEYS:
        assert applied(order, key) == applied(log, key)


@given(st.lists(st.sampled_from(KEYS), min_size=1, max_size=12), st.randoms())
def test_only_a_beginning_without_a_hole_is_acknowledged(
    keys: list[str], chance: random.Random
) -> None:
    schedule, done, numbers = ChangeSchedule(), set[int](), list[int]()
    for number, key in enumerate(keys, 1):
        schedule.add(QueuedChange(number * 2, Change(1, key, "", ChangeKind.PUT)), now_ms=number)
        numbers.append(number * 2)
    while len(schedule):
        work = chance.choice(found) if (found := schedule.start(99)) else None
        assert work is not None
        for one in found:
            if one is not work:
                schedule.give_back(one)
        done.update(work.numbers)
        schedule.finish(work)
        left = [number for number in numbers if number not in done]
        expected = [number for number in numbers if not left or number < left[0]]
        assert schedule.done_through == (expected[-1] if expected else 0)


def test_the_age_of_the_oldest_change_counts_those_it_replaced() -> None:
    schedule = ChangeSchedule()
    assert schedule.oldest_ms is None
    for number in (1, 2):
        change = Change(number, "k", "", ChangeKind.PUT, time_ms=number * 100)
        schedule.add(QueuedChange(number, change), now_ms=5)
    assert schedule.oldest_ms == 100
    (work,) = schedule.start(9)
    assert work.change.time_ms == 200


@given(
    st.lists(changes, max_size=14),
    st.sets(st.sampled_from(KEYS), min_size=1, max_size=2),
    st.randoms(use_true_random=False),
)
def test_keys_that_fail_hold_up_their_own_changes_alone(
    log: list[Change], bad: set[str], chance: random.Random
) -> None:
    """Each key has the effect of its last change in the end, whoever did that; none is
    acknowledged before it has.
    """
    log = [replace(one, index=number) for number, one in enumerate(log, 1)]
    schedule, running, held, waits = ChangeSchedule(), list[Work](), list[Work](), 0
    # The number of the last change of each key of which the target has the effect.
    effects = dict.fromkeys(KEYS, 0)
    numbers = dict[Work, int]()

    def newest(work: Work) -> int:
        """The last change whose effect it has at least; a look has that of whatever was
        done before it, too.
        """
        return max(work.change.index, numbers.get(work, 0), *work.numbers)

    def apply(work: Work) -> None:
        keys = [key for key in KEYS if work.touches(key)]
        failing = [key for key in keys if key in bad]
        if work.change.index:
            assert all(effects[key] <= newest(work) for key in keys if key not in bad)
        if failing and not work.is_prefix:
            held.append(work)
            schedule.hold(work)
            return
        done = [key for key in keys if key not in failing]
        effects.update({key: max(effects[key], newest(work)) for key in done})
        if not failing:
            schedule.finish(work)
            return
        left = [Change(0, key, "", ChangeKind.DELETE) for key in failing]
        for part in schedule.split(work, left):
            numbers[part] = work.change.index
            held.append(part)
            schedule.hold(part)

    added = 0
    while added < len(log) or len(schedule):
        held = [one for one in held if one.is_held]
        waits += 1
        if added == len(log) and waits > 200:
            bad = set()
        match chance.randrange(4):
            case 0 if added < len(log):
                added += 1
                schedule.add(QueuedChange(added, log[added - 1]), now_ms=added)
            case 1 if held:
                work = held.pop(chance.randrange(len(held)))
                schedule.give_back(work)
            case 2:
                running += schedule.start(chance.randrange(3))
            case _ if running:
                apply(running.pop(chance.randrange(len(running))))
            case _:
                pass
        for one in log[: schedule.done_through]:
            touched = [key for key in KEYS if Work(one, [], 0, (0, 0)).touches(key)]
            assert all(effects[key] >= one.index for key in touched)
    assert schedule.done_through == len(log)
    assert not schedule.pending()
