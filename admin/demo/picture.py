"""What a demo printed, as a picture."""

import re
from pathlib import Path

from rich.console import Console


def write_picture(out: Console, path: Path, title: str) -> None:
    """Write what was printed to a recording console as an SVG file."""
    # Remove web fonts: the picture must be viewable without a network.
    path.write_text(
        re.sub(r"@font-face \{.*?\}\s*", "", out.export_svg(title=title), flags=re.DOTALL)
    )
