"""The pages, and what they answer: read-only unless the process has a token.

Whoever knows the token, as the password that a browser asks for, may give orders. A
page of another site can neither give them (its origin is another one) nor read ours:
requests must name this machine, so that a foreign name that is made to lead here is
refused. Endpoints are synchronous: they run in threads.
"""

import base64
import binascii
import hmac
import ipaddress
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Generic, TypeVar

import jinja2
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from merkle.errors import ReconcileError
from merkle.limits import CONTAINER_ID_MAX
from protos.errors import AmbiguousIdError, JobNotFoundError
from repair.picture import BlockCell
from runtime.eta import duration_text
from runtime.log import get_logger
from runtime.output import printable, size_text
from scm.dashboard.blocks import BlockPictures
from scm.dashboard.page import (
    CONTAINERS_MAX,
    ClusterPage,
    block_grid,
    cluster_page,
    next_command,
    progress_share,
)
from scm.dashboard.ports import ClusterReader, JobBoard
from scm.dashboard.proofs import read_proofs
from scm.events import CONTROLLER_EVENTS

# Of the jobs that are read for a page; those of a day, unless there are more.
_JOBS_READ_MAX = 500
# Everybody who looks within this time sees the same: many viewers cost as one.
_FRESH_S = 1.0
_REFRESH_S = 5
# Who orders by the page; the token has no name.
_REQUESTER = "dashboard"
# Nothing is loaded from anywhere, no script runs, and nobody frames the page.
_POLICY = "Content-Security-Policy"
_CLOSED_POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; "
_HEADERS = {
    _POLICY: _CLOSED_POLICY + "style-src 'unsafe-inline'; form-action 'self'",
    "Cache-Control": "no-store",
    # With a stricter one, browsers hide the origin of forms.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
# The report of a sweep searches its table by a script in it.
_REPORT_POLICY = _CLOSED_POLICY + "style-src 'unsafe-inline'; script-src 'unsafe-inline'"
# No state is shown by colour alone.
_MARKS = {cell.name: "" for cell in BlockCell} | {
    "CORRUPT": "x",
    "CONFLICT": "?",
    "PARTLY_MISSING": "-",
    "DELETED": "d",
}
_ORDERS = ("cancel", "pause", "resume")

if TYPE_CHECKING:
    from scm.dashboard.sweeps import SweepFolder

T = TypeVar("T")
_log = get_logger("scm", CONTROLLER_EVENTS)


class _Recent(Generic[T]):
    """What was read last, for as long as it is fresh; one thread reads it anew."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._lock = Lock()
        self._found: tuple[float, T] | None = None

    def get(self) -> T:
        with self._lock:
            now_s = time.monotonic()
            if self._found is None or now_s - self._found[0] > _FRESH_S:
                self._found = now_s, self._read()
            return self._found[1]


class Dashboard:
    """The application; `app` serves it."""

    def __init__(
        self,
        reader: ClusterReader,
        board: JobBoard,
        pictures: BlockPictures,
        *,
        token: str = "",
        sweeps: "SweepFolder | None" = None,
        bucket_metrics: Path | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Without a `token` nobody can order anything."""
        self._sweeps = sweeps
        self._proofs = _Recent(partial(read_proofs, bucket_metrics)) if bucket_metrics else None
        self._last_sweep = _Recent(sweeps.last) if sweeps else None
        self._reader = reader
        self._board = board
        self._pictures = pictures
        self._token = token.encode()
        self._clock = wall_clock
        self._recent = _Recent(self._read_cluster)
        self._names = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}
        self._templates = jinja2.Environment(
            loader=jinja2.PackageLoader("scm.dashboard", "data"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "duration": duration_text,
            "size": size_text,
            "share": lambda job: progress_share(job.bytes_done, job.bytes_planned),
            "next_command": next_command,
            "since": lambda at_s: duration_text(max(0.0, self._clock() - at_s)),
        }
        self._templates.globals |= {"cells": list(BlockCell), "marks": _MARKS}
        routes = [
            Route("/", self._cluster),
            Route("/containers/{container_id:int}", self._container),
            Route("/jobs/{job_id}", self._job),
            Route("/sweep", self._sweep_report),
            Route("/sign-in", self._sign_in),
            Route("/containers/{container_id:int}/reconcile", self._reconcile, methods=["POST"]),
            Route("/jobs/{job_id}/{order}", self._order, methods=["POST"]),
        ]
        self.app = Starlette(
            routes=routes,
            exception_handlers={HTTPException: self._refused, Exception: self._failed},
        )

    def _read_cluster(self) -> ClusterPage:
        return cluster_page(
            self._reader.status(),
            self._reader.diverged(CONTAINERS_MAX),
            self._reader.datanodes(),
            self._reader.jobs(_JOBS_READ_MAX),
            self._clock(),
        )

    def _cluster(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        sweep = self._last_sweep.get() if self._last_sweep else None
        proofs = self._proofs.get() if self._proofs else None
        page = self._recent.get()
        return self._page(request, "cluster.html.j2", page=page, sweep=sweep, buckets=proofs)

    def _container(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        container_id = request.path_params["container_id"]
        known = 0 < container_id <= CONTAINER_ID_MAX
        container = self._reader.container(container_id) if known else None
        if container is None:
            return self._error(request, 404, f"No datanode has reported container {container_id}.")
        jobs = [
            job for job in self._reader.jobs(_JOBS_READ_MAX) if job.container_id == container_id
        ]
        picture = self._pictures.picture(container)
        return self._page(
            request, "container.html.j2", container=container, jobs=jobs, picture=picture
        )

    def _job(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        try:
            job = self._board.job(request.path_params["job_id"])
        except (JobNotFoundError, AmbiguousIdError) as error:
            return self._error(request, 404, error.message)
        return self._page(request, "job.html.j2", job=job, grid=block_grid(job.orders))

    def _sweep_report(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        report = self._sweeps.report() if self._sweeps else None
        if report is None:
            return self._error(request, 404, "There is no report of a sweep.")
        return HTMLResponse(report, headers=_HEADERS | {_POLICY: _REPORT_POLICY})

    def _sign_in(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        return self._order_refusal(request) or RedirectResponse("/", 303, _HEADERS)

    def _reconcile(self, request: Request) -> Response:
        if refusal := self._refusal(request) or self._order_refusal(request):
            return refusal
        container_id = request.path_params["container_id"]
        if not 0 < container_id <= CONTAINER_ID_MAX:
            return self._error(request, 404, f"No datanode has reported container {container_id}.")
        try:
            answer = self._board.reconcile(container_id, _REQUESTER)
        except ReconcileError as error:
            return self._error(request, 409, error.message)
        if answer.job_id is None:
            return self._error(request, 409, answer.ruling.message)
        return RedirectResponse(f"/jobs/{answer.job_id}", 303, _HEADERS)

    def _order(self, request: Request) -> Response:
        if refusal := self._refusal(request) or self._order_refusal(request):
            return refusal
        job_id, order = request.path_params["job_id"], request.path_params["order"]
        if order not in _ORDERS:
            return self._error(request, 404, f"A job cannot be told to {printable(order)}.")
        orders = {
            "cancel": self._board.cancel,
            "pause": self._board.pause,
            "resume": self._board.resume,
        }
        try:
            if (state := self._board.job(job_id).state).is_terminal:
                return self._error(request, 409, f"The job has ended: {state.value}.")
            orders[order](job_id, _REQUESTER)
        except JobNotFoundError as error:
            return self._error(request, 404, error.message)
        except ReconcileError as error:
            return self._error(request, 409, error.message)
        return RedirectResponse(f"/jobs/{job_id}", 303, _HEADERS)

    def _refusal(self, request: Request) -> Response | None:
        if _names_machine(request.headers.get("host", ""), self._names):
            return None
        text = "This page is asked for by the address of its machine, or by the machine's name."
        return self._error(request, 421, text)

    def _order_refusal(self, request: Request) -> Response | None:
        """Why the caller may not order anything; None if it may."""
        if not self._token:
            text = "Orders need a token: set dashboard.token_file, and start the controller again."
            return self._error(request, 403, text)
        if request.method == "POST" and not _is_of_this_page(request.headers):
            return self._error(request, 403, "Orders come from this page only.")
        if not self._may_order(request):
            response = self._error(request, 401, "The password is the token of the dashboard.")
            response.headers["WWW-Authenticate"] = 'Basic realm="treefold", charset="UTF-8"'
            return response
        return None

    def _may_order(self, request: Request) -> bool:
        return bool(self._token) and hmac.compare_digest(_password(request.headers), self._token)

    def _refused(self, request: Request, error: Exception) -> Response:
        """The answer to a path or a method that is none of ours."""
        assert isinstance(error, HTTPException)
        return self._error(request, error.status_code, error.detail)

    def _failed(self, request: Request, error: Exception) -> Response:
        """The answer to what nobody foresaw; the cause is in the log."""
        if isinstance(error, ReconcileError):
            return self._error(request, 503, error.message)
        _log.error("page_failed", path=request.url.path, exc_info=error)
        return self._error(request, 500, "The page failed; the log of the controller says how.")

    def _page(self, request: Request, name: str, status: int = 200, **values: object) -> Response:
        text = self._templates.get_template(name).render(
            refresh_s=_REFRESH_S,
            has_token=bool(self._token),
            may_order=self._may_order(request),
            **values,
        )
        return HTMLResponse(text, status, _HEADERS)

    def _error(self, request: Request, status: int, text: str) -> Response:
        return self._page(request, "error.html.j2", status, text=text)


def _names_machine(host: str, names: set[str]) -> bool:
    """Whether a header Host is an IP address or a name of this machine: no other site
    can have these.
    """
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    name = name.strip("[]").lower()
    if name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_of_this_page(headers: Headers) -> bool:
    """Whether a form was sent by a page of ours; what is no browser sends no origin."""
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host")


def _password(headers: Headers) -> bytes:
    scheme, _, encoded = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
