"""`treefold scan`: have the agents read replicas and compare every chunk with its
recorded checksums.
"""

import click

from admin.answer import answering, container_ids, controller_options, json_option
from admin.controller_client import ControllerClient


@click.command()
@click.argument("arguments", metavar="ID... | -", nargs=-1)
@json_option
@controller_options
def scan(*, controller: ControllerClient, arguments: tuple[str, ...], as_json: bool) -> None:
    """Have agents read replicas and look for damage.

    Orders a scan of every live replica of these containers and does not wait for it;
    `treefold container info` shows state, root and time of the last scan. IDs are
    arguments, or lines of standard input with `-`.

    Exit status: 0 ordered, 1 a container is not known, 2 usage, 7 controller
    unreachable.
    """
    with answering("scan", as_json=as_json) as answer:
        unknown, ordered = controller.scan(container_ids(arguments))
        answer.data = {"scansOrdered": ordered, "unknownContainerIDs": unknown}
        answer.say(f"{ordered} scan{'' if ordered == 1 else 's'} ordered")
        for number in unknown:
            answer.fail("CONTAINER_NOT_FOUND", f"Container {number} is not known.")
