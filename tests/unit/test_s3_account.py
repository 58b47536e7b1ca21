"""Who asks an S3 store: found in the environment and in profiles, as for every S3 tool.

Each account is found by a process with an environment of its own.
"""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.processes import ROOT

SECRET = "wJalrXUtnFEMI/K7MDENG"
FIND = """
import json, sys
from merkle.errors import ReconcileError
from runtime.s3_account import S3Settings, configured_endpoint, find_account
settings = S3Settings(**json.loads(sys.argv[1]))
try:
    account = find_account(settings)
    keys = account.credentials.get_frozen_credentials()
    endpoint_url = configured_endpoint(settings)
except ReconcileError as error:
    print(json.dumps({"error": error.code, "message": error.message}))
    sys.exit()
assert endpoint_url == (account.endpoint_url or "")
print(json.dumps({
    "keys": [keys.access_key, keys.secret_key, keys.token],
    "region": account.region,
    "endpoint_url": account.endpoint_url,
    "ca_bundle": account.ca_bundle,
}))
"""


def found(home: Path, variables: dict[str, str], **settings: str) -> dict[str, object]:
    """The account for these settings, or the error, in a home with these variables."""
    done = subprocess.run(
        [sys.executable, "-c", FIND, json.dumps(settings)],
        cwd=ROOT,
        env={
            "HOME": str(home),
            "PATH": "/usr/bin",
            "PYTHONPATH": str(ROOT),
            # What is no machine of AWS is not asked.
            "AWS_EC2_METADATA_DISABLED": "true",
            **variables,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def write(home: Path, *, credentials: str, config: str) -> None:
    """The two files of profiles."""
    (home / ".aws").mkdir()
    (home / ".aws" / "credentials").write_text(credentials)
    (home / ".aws" / "config").write_text(config)


def test_a_profile_names_keys_region_endpoint_and_certificates(tmp_path: Path) -> None:
    keys = f"aws_access_key_id = FAR\naws_secret_access_key = {SECRET}\naws_session_token = t\n"
    more = "region = eu-far-1\nendpoint_url = http://far\nca_bundle = /ca\n"
    write(tmp_path, credentials=f"[far]\n{keys}", config=f"[profile far]\n{more}")
    account = {
        "keys": ["FAR", SECRET, "t"],
        "region": "eu-far-1",
        "endpoint_url": "http://far",
        "ca_bundle": "/ca",
    }
    assert found(tmp_path, {}, profile="far") == account
    assert found(tmp_path, {"AWS_PROFILE": "far"}) == account
    # What is given by name comes first.
    given = found(tmp_path, {}, profile="far", region="x-1", endpoint_url="http://near")
    assert given == account | {"region": "x-1", "endpoint_url": "http://near"}


def test_the_environment_gives_keys_where_no_profile_is_named(tmp_path: Path) -> None:
    write(tmp_path, credentials="", config="[profile far]\nregion = eu-far-1\n")
    keys = {"AWS_ACCESS_KEY_ID": "NEAR", "AWS_SECRET_ACCESS_KEY": SECRET}
    account = {
        "keys": ["NEAR", SECRET, None],
        "region": "us-east-1",
        "endpoint_url": None,
        "ca_bundle": None,
    }
    assert found(tmp_path, keys) == account
    more = {"AWS_DEFAULT_REGION": "r-1", "AWS_ENDPOINT_URL_S3": "http://s3", "AWS_CA_BUNDLE": "/c"}
    wider = {"region": "r-1", "endpoint_url": "http://s3", "ca_bundle": "/c"}
    assert found(tmp_path, keys | more) == account | wider


def test_who_is_not_found_is_an_error(tmp_path: Path) -> None:
    missing = found(tmp_path, {})
    assert missing["error"] == "config_invalid"
    assert "no S3 credentials" in str(missing["message"])
    assert "gone" in str(found(tmp_path, {}, profile="gone")["message"])
