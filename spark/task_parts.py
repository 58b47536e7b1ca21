"""The parts of one task, as the text that Spark hands to it.

Each manifest is in the text once, so that no task reads it again, and a task gets those
of its own parts alone: all manifests of a fleet are some megabytes.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from chunktable.manifest import parse_manifest
from runtime.documents import parse_json
from sweep.exports import AT_ONCE
from sweep.model import Part
from sweep.work import parts_of

R = TypeVar("R")


def text_of(parts: Mapping[int, Part]) -> str:
    """The text for these parts, by their numbers."""
    exports = {part.manifest: part.export for part in parts.values()}
    document = {
        "numbers": list(parts),
        "parts": [part.document() for part in parts.values()],
        "exports": {
            place: [export.name, export.to_bytes(compact=True).decode()]
            for place, export in exports.items()
            if place is not None and export is not None
        },
    }
    return json.dumps(document, default=lambda value: value.value)


def parts_of_text(text: str) -> dict[int, Part]:
    """The parts in a text, by their numbers."""
    document = parse_json(text)
    exports = {
        place: parse_manifest(raw.encode(), name)
        for place, (name, raw) in document["exports"].items()
    }
    parts = parts_of(document["parts"])
    return {
        number: replace(part, export=exports.get(part.manifest or ""))
        for number, part in zip(document["numbers"], parts, strict=True)
    }


def at_once(parts: Mapping[int, Part], work: Callable[[Part], R]) -> Iterator[tuple[int, R]]:
    """The numbers of the parts and the results of `work`, which reads a part, in their
    order. Where parts are remote, some are read at a time: most of it is waiting.
    """
    # Elsewhere threads only wait for each other.
    threads = AT_ONCE if any("://" in part.location for part in parts.values()) else 1
    waiting, running = iter(parts.items()), deque[tuple[int, Future[R]]]()
    with ThreadPoolExecutor(threads, "export") as pool:
        while True:
            # Ahead by no more than the threads, or results would pile up.
            for number, part in islice(waiting, threads - len(running)):
                running.append((number, pool.submit(work, part)))
            if not running:
                return
            number, result = running.popleft()
            yield number, result.result()
