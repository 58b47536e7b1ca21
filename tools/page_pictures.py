"""Draw the page of the controller for README.md (`make pictures`): docs/page-*.png.

The page is a real one: of a controller and three agents on the damaged volumes that the
demo heals: one container is reconciled, and others are, slowly enough to be seen.
"""

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread

from admin.demo.cluster import LocalCluster, reported_replicas, unpack_volumes

_DOCS = Path(__file__).resolve().parents[1] / "docs"
# A container under repair takes a minute at this rate.
_BYTES_PER_SECOND = 2 << 10
# Until the jobs have begun to write.
_SEEN_AFTER_S = 4.0
_COLOURS = {"light": (), "dark": ("--blink-settings=preferredColorScheme=0",)}


def main() -> None:
    """Start the cluster, reconcile, and draw the page light and dark."""
    browser = shutil.which("chromium")
    if browser is None:
        sys.exit("chromium is missing; run: apt-get install chromium")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory(prefix="treefold-page-") as name:
        scratch = Path(name)
        volumes = unpack_volumes("damaged", scratch / "damaged")
        with LocalCluster(volumes, scratch / "processes", dashboard=address) as cluster:
            cluster.scan(reported_replicas(cluster))
            first, *others = [
                str(view.container_id) for view in cluster.containers() if view.ruling.is_ok
            ]
            cluster.command("reconcile", first, "--yes", "--wait")
            for agent in volumes:
                cluster.stop_agent(agent)
                cluster.start_agent(agent, bytes_per_second=_BYTES_PER_SECOND)
            jobs = Thread(target=cluster.command, args=("reconcile", *others, "--yes"), daemon=True)
            jobs.start()
            time.sleep(_SEEN_AFTER_S)
            for colour, flags in _COLOURS.items():
                _draw(browser, f"http://{address}/", _DOCS / f"page-{colour}.png", scratch, flags)
            for agent in volumes:
                cluster.kill_agent(agent)


def _draw(browser: str, url: str, picture: Path, scratch: Path, flags: tuple[str, ...]) -> None:
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--force-device-scale-factor=0.75", "--window-size=1180,960",
        f"--user-data-dir={scratch / 'profile'}", f"--screenshot={picture}",
    ]  # fmt: skip
    subprocess.run([*command, *flags, url], check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
