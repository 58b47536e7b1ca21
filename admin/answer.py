"""What commands that call a controller have in common: options and container IDs."""

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import click
from click.core import ParameterSource

from admin.client_config import CONTROLLER_DEFAULT, client_config
from admin.command_result import command_result
from admin.tls_options import check_option_address, security_of, tls_options
from merkle.errors import ReconcileError
from merkle.limits import CONTAINER_ID_MAX
from runtime.errors import UsageError
from runtime.exit_codes import ExitCode
from scm.client import ControllerClient

# Container IDs of one command; a longer list needs several commands.
IDS_MAX = 1_000_000

P = ParamSpec("P")


class _NoAgentError(ReconcileError):
    """No live agent reports to the controller, so it knows of no replica."""

    code = "no_agent"
    exit_status = ExitCode.UNREACHABLE


def check_agents(controller: ControllerClient) -> None:
    """Call this before an answer that nothing was found: without agents nothing is
    known.

    Raises:
        _NoAgentError: no live agent reports to this controller.
    """
    if not controller.live_datanodes():
        raise _NoAgentError(
            f"No live agent reports to the controller at {controller.address}: it does not know"
            " how the replicas are.",
            hint="start `treefold agent run` on each datanode, with this address as `controller`;"
            " after a restart of the controller wait for the next heartbeats",
        )


def check_no_controller() -> None:
    """Call this where a command has --cluster.

    Raises:
        UsageError: the caller wrote --controller too; the environment may have it.
    """
    source = click.get_current_context().get_parameter_source("address")
    if source is ParameterSource.COMMANDLINE:
        raise UsageError(
            "give either --cluster or --controller, not both",
            hint="With --cluster SCM is asked, and no controller.",
        )


def json_option(command: Callable[P, None]) -> Callable[P, None]:
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")(
        command
    )


def controller_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for reaching the controller. The command gets a client as
    `controller`, which is closed afterwards.
    """

    @click.option(
        "--controller",
        "address",
        metavar="HOST:PORT",
        envvar="TREEFOLD_CONTROLLER",
        show_default=CONTROLLER_DEFAULT,
        help=(
            "The controller's address. Also set by TREEFOLD_CONTROLLER in the environment, and by"
            " `controller` in client.toml, which has the files of TLS too."
        ),
    )
    @tls_options("controller")
    @wraps(command)
    def connected(
        *,
        address: str | None,
        tls_cert: str | None,
        tls_key: str | None,
        tls_ca: str | None,
        insecure: bool,
        **options: object,
    ) -> None:
        try:
            config = client_config(os.environ)
            if options.get("cluster") is not None:
                check_no_controller()
            if address is not None:
                check_option_address("--controller", address)
            security = security_of(tls_cert, tls_key, tls_ca, config, insecure=insecure)
            controller = ControllerClient(
                address or config.controller, tls=security.tls, insecure=security.insecure
            )
        except ReconcileError:
            # The command's body has not begun, but --json still needs its document.
            with command_result(_name(), as_json=bool(options.get("as_json"))):
                raise
            return
        try:
            command(controller=controller, **options)
        finally:
            controller.close()

    return connected


def _name() -> str:
    context, words = click.get_current_context(), list[str]()
    while context.parent is not None:
        words.insert(0, context.info_name or "")
        context = context.parent
    return " ".join(words)


def container_ids(arguments: tuple[str, ...]) -> list[int]:
    """The container IDs in `arguments`, or on standard input if the only argument is
    `-`; in order, without duplicates.

    Raises:
        UsageError: there are no IDs or too many, or some are not positive integers.
    """
    if not arguments:
        raise UsageError("Missing required parameter: '<container ID>'")
    texts = list(arguments)
    if texts == ["-"]:
        try:
            texts = [line.strip() for line in sys.stdin if line.strip()]
        except UnicodeDecodeError as error:
            raise UsageError(
                "standard input is not text: one container ID per line is expected"
            ) from error
    if len(texts) > IDS_MAX:
        raise UsageError(f"{len(texts)} container IDs are too many: {IDS_MAX} at most")
    invalid = [text for text in texts if not _is_id(text)]
    if invalid:
        named = " ".join(invalid[:100])
        raise UsageError(f"Container IDs must be positive integers. Invalid container IDs: {named}")
    return list(dict.fromkeys(int(text) for text in texts))


def _is_id(text: str) -> bool:
    # int() accepts more than Ozone: blanks, underscores, digits of other scripts.
    digits = text.removeprefix("+")
    return (
        digits.isascii()
        and digits.isdigit()
        and len(digits) < 100
        and 0 < int(digits) <= CONTAINER_ID_MAX
    )
