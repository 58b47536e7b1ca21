"""Two real Ceph object stores: independent, checking who asks, and durable. Run by
`make test-peers`.
"""

import json
from dataclasses import replace

import pytest
import urllib3
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from tests.support.rgw import RgwPair, RgwSite
from tests.support.s3_servers import S3Bucket, S3Endpoint

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]


def send(endpoint: S3Endpoint, method: str, path: str, body: bytes = b"") -> urllib3.HTTPResponse:
    """One signed request of any kind, as botocore's client knows only those of S3."""
    request = AWSRequest(method, endpoint.url + path, data=body)
    user = Credentials(endpoint.access_key, endpoint.secret_key)
    S3SigV4Auth(user, "s3", endpoint.region).add_auth(request)
    with urllib3.PoolManager() as pool:
        answer: urllib3.HTTPResponse = pool.request(
            method, request.url, body=body, headers=dict(request.headers), retries=False
        )
    return answer


def test_an_object_is_at_the_site_where_it_was_put_and_nowhere_else(rgw_pair: RgwPair) -> None:
    here = rgw_pair.site("a").endpoint.fresh_bucket()
    there = replace(here, endpoint=rgw_pair.site("b").endpoint)
    with here.endpoint.client() as client:
        client.put_object(Bucket=here.name, Key="key", Body=b"bytes")
        answer = client.get_object(Bucket=here.name, Key="key")
        assert answer["Body"].read() == b"bytes"
    with there.endpoint.client() as client, pytest.raises(ClientError, match="NoSuchBucket"):
        client.get_object(Bucket=there.name, Key="key")


def test_a_wrong_secret_is_refused(rgw_bucket: S3Bucket) -> None:
    stranger = replace(rgw_bucket.endpoint, secret_key="wrong")
    with stranger.client() as client, pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        client.list_objects_v2(Bucket=rgw_bucket.name)


def test_the_change_logs_are_open_to_their_reader_only(rgw: RgwSite) -> None:
    path = "/admin/log?type=data"
    answer = send(rgw.log_reader, "GET", path)
    assert answer.status == 200
    assert json.loads(answer.data)["num_objects"] > 0
    assert send(rgw.endpoint, "GET", path).status == 403


def test_a_version_id_is_kept_when_the_system_user_gives_it(
    rgw: RgwSite, rgw_bucket: S3Bucket
) -> None:
    enabled = {"Status": "Enabled"}
    with rgw.endpoint.client() as client:
        client.put_bucket_versioning(Bucket=rgw_bucket.name, VersioningConfiguration=enabled)
        for user, key in ((rgw.system, "ours"), (rgw.endpoint, "theirs")):
            query = "rgwx-version-id=v1&rgwx-versioned-epoch=10"
            assert send(user, "PUT", f"/{rgw_bucket.name}/{key}?{query}", b"x").status == 200
        listed = client.list_object_versions(Bucket=rgw_bucket.name)["Versions"]
    versions = {row["Key"]: row["VersionId"] for row in listed}
    assert versions["ours"] == "v1" != versions["theirs"]


def test_an_object_outlives_the_end_of_every_daemon(rgw_pair: RgwPair) -> None:
    site = rgw_pair.site("b")
    bucket = site.endpoint.fresh_bucket()
    with site.endpoint.client() as client:
        client.put_object(Bucket=bucket.name, Key="key", Body=b"bytes")
        for daemon in ("rgw", "osd", "mon"):
            rgw_pair.kill("b", daemon)
        for daemon in ("mon", "osd", "rgw"):
            rgw_pair.start("b", daemon)
        answer = client.get_object(Bucket=bucket.name, Key="key")
        assert answer["Body"].read() == b"bytes"
