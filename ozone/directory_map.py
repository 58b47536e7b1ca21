"""Where each directory of an FSO bucket is, by the object IDs that rows have.

Rows name a parent by its ID alone. A renamed directory is one row, whatever is below.
"""

from dataclasses import dataclass, field

# Of a path; deeper ones exist nowhere, and a circle would have no end.
_DEPTH_MAX = 10_000


@dataclass(slots=True)
class DirectoryMap:
    """Directories below the bucket with the ID `root`."""

    root: int
    _places: dict[int, tuple[int, str]] = field(default_factory=dict)
    _children: dict[tuple[int, str], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, object_id: int) -> bool:
        return object_id in self._places

    def place(self, object_id: int) -> tuple[int, str] | None:
        """Parent and name of a directory."""
        return self._places.get(object_id)

    def child(self, parent_id: int, name: str) -> int | None:
        """The directory of this name below another one."""
        return self._children.get((parent_id, name))

    def put(self, object_id: int, parent_id: int, name: str) -> None:
        """Add a directory, or move it; another one of that place is no longer known."""
        self.remove(object_id)
        replaced = self._children.get((parent_id, name))
        if replaced is not None:
            self.remove(replaced)
        self._places[object_id] = parent_id, name
        self._children[parent_id, name] = object_id

    def remove(self, object_id: int) -> None:
        """Forget a directory; those below it are out of reach then."""
        place = self._places.pop(object_id, None)
        if place is not None:
            del self._children[place]

    def prefix(self, object_id: int) -> str | None:
        """The path of a directory with a slash at its end, empty of the bucket itself;
        None where it is out of reach.
        """
        names = list[str]()
        while object_id != self.root:
            place = self._places.get(object_id)
            if place is None or len(names) > _DEPTH_MAX:
                return None
            object_id = place[0]
            names.append(place[1])
        return "".join(f"{name}/" for name in reversed(names))
