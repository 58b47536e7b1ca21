"""Whether two addresses are a source and a target, or one bucket under two names."""

import os
from urllib.parse import parse_qs, unquote, urlsplit

from merkle.errors import RefusalError


class PairRefusedError(RefusalError):
    """A bucket is not copied to itself."""

    code = "pair_refused"
    exit_status = 6


def check_pair(source: str, target: str) -> None:
    """Check that no object of one address is an object of the other.

    Raises:
        PairRefusedError: they overlap; reason `same_bucket`.
    """
    place, prefix = _place(source)
    other_place, other = _place(target)
    if place[0] != other_place[0] or place[2:] != other_place[2:]:
        return
    # A service of Ozone has several OMs: one in common is the same.
    if not set(place[1].split(",")) & set(other_place[1].split(",")):
        return
    if not prefix.startswith(other) and not other.startswith(prefix):
        return
    raise PairRefusedError(
        "same_bucket",
        f"{source} and {target} are the same bucket, or one is inside the other",
        hint="Name another bucket, or prefixes of which neither begins with the other.",
        source=source,
        target=target,
    )


def bucket_identity(address: str) -> str:
    """One text for all addresses that are known to name one bucket and prefix."""
    (scheme, servers, bucket), prefix = _place(address)
    return "\n".join((scheme, ",".join(sorted(servers.split(","))), bucket, prefix))


def _place(address: str) -> tuple[tuple[str, str, str], str]:
    """The bucket and the prefix in it."""
    scheme, colon, rest = address.partition(":")
    if colon and scheme.lower() == "local":
        # Links are followed: two names of one folder are one bucket (OZ-002).
        return ("local", "", ""), os.path.realpath(rest) + os.sep
    parts = urlsplit(address)
    if parts.scheme == "ozone":
        volume, _, rest = unquote(parts.path).removeprefix("/").partition("/")
        bucket, _, below = rest.partition("/")
        servers = ",".join(_server(f"grpc://{one}") for one in parts.netloc.split(","))
        return ("ozone", servers, f"{volume}/{bucket}"), _folder(below)
    endpoint = parse_qs(parts.query).get("endpoint_url", [""])[0]
    prefix = _folder(unquote(parts.path.removeprefix("/")))
    return (parts.scheme, _server(endpoint), parts.netloc), prefix


def _folder(prefix: str) -> str:
    """A prefix as a folder: `x` and `xy` do not overlap."""
    return prefix if not prefix or prefix.endswith("/") else prefix + "/"


def _server(endpoint: str) -> str:
    """Who answers at an endpoint, by one name of several."""
    where = urlsplit(endpoint)
    host = (where.hostname or "").lower()
    if not host or host.endswith(".amazonaws.com"):
        # Whichever region is asked: the name of a bucket is one in all of AWS.
        return ""
    if host in _LOOPBACK:
        host = "localhost"
    return f"{host}:{where.port or _PORTS.get(where.scheme, '')}"


_PORTS = {"http": 80, "https": 443}
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
