"""What is found without botocore is what botocore finds, or nothing is found."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.s3_account import (
    S3Account,
    S3Settings,
    account_of_botocore,
    plain_account,
)

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
            assert described(plain) == described(account_of_botocore(asked))


def test_the_plain_ways_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[far]\naws_access_key_id = FAR\naws_secret_access_key = s\naws_session_token = t\n"
    )
    config = tmp_path / ".aws" / "config"
    config.write_text("[profile far]\nregion = eu-far-1\n")
    found = plain_account(S3Settings(profile="far"), {})
    assert found is not None
    assert described(found) == (("FAR", "s", "t"), "eu-far-1", None, None)
    keys = {"AWS_ACCESS_KEY_ID": "NEAR", "AWS_SECRET_ACCESS_KEY": "s"}
    found = plain_account(S3Settings(endpoint_url="http://h"), keys)
    assert found is not None
    assert described(found) == (("NEAR", "s", None), "us-east-1", "http://h", None)


@pytest.mark.parametrize(
    "variables",
    [
        {"AWS_ROLE_ARN": "r"},
        {"AWS_WEB_IDENTITY_TOKEN_FILE": "f"},
        {"AWS_DEFAULT_REGION": ""},
        {"AWS_SOMETHING_NEW": "x"},
        {"AWS_PROFILE": "gone"},
    ],
)
def test_whatever_else_is_said_is_left_to_botocore(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = {"AWS_ACCESS_KEY_ID": "NEAR", "AWS_SECRET_ACCESS_KEY": "s"}
    assert plain_account(S3Settings(), keys | variables) is None


@pytest.mark.parametrize(
    "option", ["role_arn = r", "sso_session = s", "credential_process = p", "s3 =\n  a = b"]
)
def test_a_profile_with_more_than_plain_options_is_left_to_botocore(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[far]\naws_access_key_id = FAR\naws_secret_access_key = s\n"
    )
    (tmp_path / ".aws" / "config").write_text(f"[profile far]\n{option}\n")
    assert plain_account(S3Settings(profile="far"), {}) is None
