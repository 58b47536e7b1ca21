"""How clients move from one bucket to another (OZ-148, OZ-149, OZ-150)."""

from urllib.parse import parse_qs, urlsplit


def client_steps(old: str, new: str) -> tuple[str, ...]:
    """What to do for each kind of client, as sentences. The addresses are those of
    stores.
    """
    ours, theirs = urlsplit(old), urlsplit(new)
    steps = list[str]()
    if theirs.scheme == "ozone":
        steps += _file_system_steps(ours.netloc, ours.path, theirs.netloc, theirs.path)
    if theirs.scheme in ("ozone", "s3"):
        steps += _s3_steps(old, new)
    if not steps:
        steps.append(f"Clients open {new} instead of {old}.")
    steps.append("Check that a client can write, and that its object is in the new bucket.")
    return tuple(steps)


def _file_system_steps(
    old_service: str, old_path: str, new_service: str, new_path: str
) -> list[str]:
    before, after = f"ofs://{old_service}{old_path}", f"ofs://{new_service}{new_path}"
    return [
        f"File system clients with federation: change the entry of the mount table in ZooKeeper"
        f" from {before} to {after}, and wait until clients have read it.",
        f"File system clients without federation: change {before} to {after}. Their configuration"
        f" needs the service of both (ozone.om.service.ids).",
    ]


def _s3_steps(old: str, new: str) -> list[str]:
    old_endpoint, old_bucket = _endpoint_and_bucket(old)
    new_endpoint, new_bucket = _endpoint_and_bucket(new)
    if old_endpoint == new_endpoint:
        return [f"S3 clients: change the bucket from {old_bucket} to {new_bucket}."]
    return [
        f"S3 clients of a gateway that serves both: change the bucket from {old_bucket} to"
        f" {new_bucket}.",
        f"Other S3 clients: change the endpoint from {old_endpoint or 'that of their profile'} to"
        f" {new_endpoint or 'that of the other profile'}, and the bucket to {new_bucket}.",
    ]


def _endpoint_and_bucket(address: str) -> tuple[str, str]:
    parts = urlsplit(address)
    query = parse_qs(parts.query)
    names = [name for name in parts.path.split("/") if name]
    if parts.scheme == "ozone":
        # The gateway shows the buckets of one volume; others by links in it.
        return next(iter(query.get("s3", [])), ""), names[-1] if names else ""
    return next(iter(query.get("endpoint_url", [])), ""), parts.netloc
