"""The parts of one task, as the text that Spark hands to it.

Each manifest is in the text once, so that no task reads it again, and a task gets those
of its own parts alone: all manifests of a fleet are some megabytes.
"""

import json
from collections.abc import Mapping
from dataclasses import replace

from chunktable.manifest import parse_manifest
from runtime.documents import parse_json
from sweep.model import Part
from sweep.work import parts_of


def text_of(parts: Mapping[int, Part]) -> str:
    """The text for these parts, by their numbers."""
    exports = {part.manifest: part.export for part in parts.values()}
    document = {
        "numbers": list(parts),
        "parts": [part.document() for part in parts.values()],
        "exports": {
            place: [export.name, export.stored().decode()]
            for place, export in exports.items()
            if place is not None and export is not None
        },
    }
    return json.dumps(document)


def parts_of_text(text: str) -> dict[int, Part]:
    """The parts in a text, by their numbers."""
    document = parse_json(text)
    exports = {
        place: parse_manifest(raw.encode(), name, is_verified=True)
        for place, (name, raw) in document["exports"].items()
    }
    parts = parts_of(document["parts"])
    return {
        number: replace(part, export=exports.get(part.manifest or ""))
        for number, part in zip(document["numbers"], parts, strict=True)
    }
