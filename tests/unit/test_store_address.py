"""Addresses of stores, and what is said of those that are none."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator.pair import PairRefusedError, check_pair
from replicator.stores.address import LocalAddress, OzoneAddress, S3Address, parse_address
from replicator.stores.ozone_bucket import OzoneLocation
from runtime.errors import UsageError

WRONG = [
    # address, a word of the hint
    ("", "local:"),
    ("bucket", "local:bucket"),
    ("/var/data", "local:/var/data"),
    ("./a:b", "local:./a:b"),
    ("local:", "local:PATH"),
    ("LOCAL:", "local:PATH"),
    ("local://host/path", "local:/host/path"),
    ("local:~/bucket", "whole path"),
    ("s3:bucket", "s3://BUCKET"),
    ("s3:/bucket", "s3://BUCKET"),
    ("s3://", "s3://BUCKET"),
    ("s3:///prefix", "s3://BUCKET"),
    ("s3://?endpoint_url=http://x", "s3://BUCKET"),
    ("s3://key:secret@bucket", "environment"),
    ("s3a://bucket", "s3://BUCKET"),
    ("ofs://om/volume", "gateway"),
    ("ozone:om/v/b", "ozone://OM"),
    ("ozone://user:secret@om/v/b", "environment"),
    ("gs://bucket", "S3 interface"),
    ("https://host/bucket", "endpoint_url"),
    ("file:///x", "local:PATH"),
    ("other://x", "local:PATH"),
]


@pytest.mark.parametrize(("text", "hint"), WRONG)
def test_a_wrong_address_gets_a_hint(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as failed:
        parse_address(text)
    assert hint in failed.value.hint
    assert "secret" not in str(failed.value)


def test_an_address_that_is_not_text_is_named() -> None:
    for text in ("local:\udcff", "local:a\0b", "local:a\nb"):
        with pytest.raises(UsageError) as failed:
            parse_address(text)
        str(failed.value).encode()


def test_a_local_address_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_address(f"local:{tmp_path}/a b?c%20#d") == LocalAddress(tmp_path / "a b?c%20#d")
    assert parse_address("local:a/../b") == LocalAddress(tmp_path / "b")
    assert parse_address("Local:.") == LocalAddress(tmp_path)


def test_an_s3_address_is_handed_on_as_it_is() -> None:
    text = "s3://bucket/pre%20fix/?endpoint_url=http://user@h:1/&profile=x"
    assert parse_address(text) == S3Address(text)
    assert parse_address("S3://bucket") == S3Address("s3://bucket")


OZONE = "ozone://om:8981,om2:8981/v/b/pre%20fix?s3=http://g:9878"


def test_an_address_of_ozone_names_its_oms_its_bucket_and_its_gateway() -> None:
    assert parse_address(OZONE) == OzoneAddress(OZONE)
    found = OzoneLocation.parse(f"{OZONE}&s3_bucket=link&insecure=true")
    assert (found.managers, found.volume, found.bucket) == (("om:8981", "om2:8981"), "v", "b")
    assert (found.prefix, found.s3_bucket, found.insecure) == ("pre fix/", "link", True)
    assert OzoneLocation.parse(found.address).address == found.address


@pytest.mark.parametrize(
    "text",
    [
        "ozone://om:8981/v/b",
        "ozone://om:8981/v?s3=http://g",
        "ozone://om/v/b?s3=http://g",
        "ozone:///v/b?s3=http://g",
        "ozone://om:8981/v/b?s3=http://g&other=1",
        "ozone://om:8981/v/b?s3=http://g&insecure=no",
        "ozone://om:8981/v/b?s3",
        "ozone://om:8981,/v/b?s3=http://g",
    ],
)
def test_what_lacks_a_part_is_no_address_of_ozone(text: str) -> None:
    with pytest.raises(UsageError):
        OzoneLocation.parse(text)


def test_a_bucket_of_ozone_is_not_copied_to_itself() -> None:
    other = "ozone://om2:8981,om:8981/v/b?s3=http://h:1"
    for target in (OZONE, other, "ozone://om:8981/v/b/pre%20fix/below?s3=http://g:9878"):
        with pytest.raises(PairRefusedError):
            check_pair(OZONE, target)
    for target in ("ozone://om:8981/v/c?s3=http://g", "ozone://om:8981/v/b/x?s3=http://g"):
        check_pair(OZONE, target)


@given(st.text())
def test_any_text_is_an_address_or_a_usage_error(text: str) -> None:
    for prefix in ("", "local:", "s3://", "ozone://"):
        try:
            parse_address(prefix + text)
        except UsageError as error:
            str(error).encode()
            error.hint.encode()
