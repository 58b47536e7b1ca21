"""What is found without botocore is what botocore finds, or nothing is found."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.s3_account import S3Account, S3Settings, find_account, plain_account
from tests.support.processes import ROOT, STOP_S

WORDS = st.sampled_from(["one", "two", "x y"])
PROFILES = ["", "default", "near", "far"]
VARIABLES = {
    "AWS_ACCESS_KEY_ID": WORDS,
    "AWS_SECRET_ACCESS_KEY": WORDS,
    "AWS_SESSION_TOKEN": WORDS | st.just(""),
    "AWS_SECURITY_TOKEN": WORDS,
    "AWS_PROFILE": st.sampled_from(PROFILES),
    "AWS_DEFAULT_PROFILE": st.sampled_from(PROFILES),
    "AWS_DEFAULT_REGION": st.sampled_from(["r-1", ""]),
    "AWS_REGION": st.just("r-2"),
    "AWS_ENDPOINT_URL": st.just("http://global"),
    "AWS_ENDPOINT_URL_S3": st.just("http://s3"),
    "AWS_CA_BUNDLE": st.just("/ca"),
}
KEYS = ["aws_access_key_id", "aws_secret_access_key", "aws_session_token", "aws_security_token"]
OPTIONS = ["region", "endpoint_url", "ca_bundle", "output", *KEYS[:2], "services", "Region"]
SECTIONS = ["default", "profile near", 'profile "far"', "profile default", "near", "services a"]


def files(sections: list[str], options: list[str]) -> st.SearchStrategy[str]:
    """Texts of a file with some of these."""
    section = st.dictionaries(st.sampled_from(options), WORDS, max_size=4)
    return st.dictionaries(st.sampled_from(sections), section, max_size=3).map(
        lambda found: "".join(
            f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in values.items())
            for name, values in found.items()
        )
    )


def described(account: S3Account) -> tuple[object, ...]:
    keys = account.credentials.get_frozen_credentials()
    return (
        (keys.access_key, keys.secret_key, keys.token or None),
        account.region,
        account.endpoint_url,
        account.ca_bundle,
    )


@given(
    environment=st.fixed_dictionaries({}, optional=VARIABLES),
    has_keys=st.booleans(),
    config=files(SECTIONS, OPTIONS),
    credentials=files(["default", "near", "far"], KEYS),
    asked=st.builds(
        S3Settings,
        endpoint_url=st.sampled_from(["", "http://given"]),
        region=st.sampled_from(["", "r-3"]),
        profile=st.sampled_from(PROFILES),
    ),
)
@settings(max_examples=200, deadline=None)
def test_an_account_is_that_of_botocore(
    environment: dict[str, str], has_keys: bool, config: str, credentials: str, asked: S3Settings
) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"} if has_keys else {}
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        folder = Path(name)
        (folder / ".aws").mkdir()
        (folder / ".aws" / "config").write_text(config)
        (folder / ".aws" / "credentials").write_text(credentials)
        for variable in [one for one in os.environ if one.startswith("AWS_")]:
            patched.delenv(variable)
        given_here = {**environment, **keys, "HOME": name, "AWS_EC2_METADATA_DISABLED": "true"}
        for variable, value in given_here.items():
            patched.setenv(variable, value)
        plain = plain_account(asked, dict(os.environ))
        if plain is not None:
            assert described(plain) == described(find_account(asked, None))


def test_the_plain_ways_are_found(tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[far]\naws_access_key_id = FAR\naws_secret_access_key = s\naws_session_token = t\n"
    )
    (tmp_path / ".aws" / "config").write_text("[profile far]\nregion = eu-far-1\n")
    home = {"HOME": str(tmp_path)}
    found = plain_account(S3Settings(profile="far"), home)
    assert found is not None
    assert described(found) == (("FAR", "s", "t"), "eu-far-1", None, None)
    keys = {"AWS_ACCESS_KEY_ID": "NEAR", "AWS_SECRET_ACCESS_KEY": "s"}
    found = plain_account(S3Settings(endpoint_url="http://h"), home | keys)
    assert found is not None
    assert described(found) == (("NEAR", "s", None), "us-east-1", "http://h", None)
    for more in (
        {"AWS_ROLE_ARN": "r"},
        {"AWS_WEB_IDENTITY_TOKEN_FILE": "f"},
        {"AWS_DEFAULT_REGION": ""},
    ):
        assert plain_account(S3Settings(), home | keys | more) is None
    assert plain_account(S3Settings(profile="gone"), home | keys) is None
    (tmp_path / ".aws" / "config").write_text("[profile far]\nrole_arn = r\n")
    assert plain_account(S3Settings(profile="far"), home) is None


_ASKS = """
import os
from merkle.errors import ReconcileError
from runtime.s3_account import S3Settings, find_account

for asked in (S3Settings(), S3Settings(profile="gone")):
    try:
        print(find_account(asked, dict(os.environ)))
    except ReconcileError as error:
        print(error.code)
"""


def test_who_is_not_found_is_an_error(tmp_path: Path) -> None:
    # botocore reads the environment of its process: this one has one of its own.
    environment = {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}
    done = subprocess.run(
        [sys.executable, "-c", _ASKS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=STOP_S,
    )
    assert (done.stdout, done.stderr) == ("config_invalid\n" * 2, "")
