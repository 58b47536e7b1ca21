"""Configuration: what is written is what holds, and what cannot be meant is refused
with the key's name.
"""

import os
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from runtime.config import Duration, FilePath, Rate, Settings, Size, Switch, load
from runtime.errors import ConfigError
from runtime.setting_values import parse_duration, parse_rate, parse_size, split_address
from runtime.settings_files import SETTINGS_BYTES_MAX
from runtime.tls_files import Tls, read_files


class Inner(Settings):
    enabled: Switch = False
    budget_bytes: Size = 1 << 30
    min_gap_s: Duration = 900.0
    bytes_per_second: Rate = 5 << 20


class Item(Settings):
    path: FilePath
    hold: str = "read-only"


class Outer(Settings):
    scan: Inner = Inner()
    volumes: Annotated[tuple[Item, ...], Field(min_length=1)] = (Item(path=Path("/d")),)
    listen: str = "127.0.0.1:9893"
    repair: Inner | None = None


def write(folder: Path, text: str) -> Path:
    path = folder / "treefold.toml"
    path.write_text(text)
    return path


def test_a_file_is_read_with_its_units(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'listen = "127.0.0.1:1"\n[scan]\nbudget_bytes = "64MiB"\nmin_gap_s ='
        ' "15m"\nbytes_per_second = "5MiB/s"\n[[volumes]]\npath = "/data/1"\n',
    )
    config = load(path, Outer)
    assert config.scan == Inner(budget_bytes=64 << 20, min_gap_s=900, bytes_per_second=5 << 20)
    assert config.volumes[0].path == Path("/data/1")


def test_flags_win_over_the_file_and_an_absent_flag_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, '[scan]\nenabled = true\nbudget_bytes = "1MiB"\n')
    config = load(
        path, Outer, {"scan.enabled": False, "scan.budget_bytes": None, "listen": "127.0.0.1:0"}
    )
    assert (config.scan.enabled, config.scan.budget_bytes, config.listen) == (
        False,
        1 << 20,
        "127.0.0.1:0",
    )


def test_without_a_file_the_defaults_hold() -> None:
    assert load(None, Outer) == Outer()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[scan]\nenabeld = true\n", "scan.enabeld: unknown key; did you mean 'enabled'?"),
        ("lisen = ''\n", "lisen: unknown key; did you mean 'listen'?"),
        (
            "[repair]\nbudget_byte = 1\n",
            "repair.budget_byte: unknown key; did you mean 'budget_bytes'?",
        ),
        (
            "[[volumes]]\npath='/a'\nhodl='x'\n",
            "volumes[0].hodl: unknown key; did you mean 'hold'?",
        ),
        ("xyzzy = 1\n", "xyzzy: unknown key"),
        ("[[volumes]]\nhold = 'owner'\n", "volumes[0].path: is required"),
        ("[[volumes]]\npath = ''\n", "volumes[0].path: expected a path"),
        ("[scan]\nmin_gap_s = 'soon'\n", "scan.min_gap_s: expected a duration"),
        ("[scan]\nmin_gap_s = -1\n", "scan.min_gap_s: expected a duration"),
        ("[scan]\nmin_gap_s = nan\n", "scan.min_gap_s: expected a duration"),
        ("[scan]\nbudget_bytes = '1 parsec'\n", "scan.budget_bytes: expected a size"),
        ("[scan]\nenabled = 'yes'\n", "scan.enabled: expected true or false, found 'yes'"),
        ("[scan]\nenabled = 'true'\n", "scan.enabled: expected true or false, found 'true'"),
        ("[scan]\nenabled = 1\n", "scan.enabled: expected true or false, found 1"),
        ("[scan]\nenabled = 0.0\n", "scan.enabled: expected true or false, found 0.0"),
        ("volumes = []\n", "volumes: "),
        ("[scan]\nbudget_bytes = true\n", "scan.budget_bytes: expected a size"),
        ("[scan]\nbytes_per_second = [1]\n", "scan.bytes_per_second: expected a rate"),
        ("scan = 3\n", "scan: "),
        ("a = \n", "not TOML"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_file(tmp_path: Path, text: str, named: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path, Outer)
    assert named in caught.value.message
    assert str(path) in caught.value.message


def test_a_list_is_not_also_too_short_where_its_item_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, "[[volumes]]\npath = ''\n"), Outer)
    assert caught.value.facts["problems"] == (
        "volumes[0].path: expected a path, found an empty text",
    )


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "none.toml", Outer)


def test_bytes_that_are_no_text_are_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not TOML"):
        load(path, Outer)


@pytest.mark.parametrize(
    ("length", "accepted"), [(SETTINGS_BYTES_MAX, True), (SETTINGS_BYTES_MAX + 1, False)]
)
def test_the_size_of_a_file_is_bounded(tmp_path: Path, length: int, accepted: bool) -> None:
    path = write(tmp_path, "#" * length)
    if accepted:
        assert load(path, Outer) == Outer()
    else:
        with pytest.raises(ConfigError, match="larger than"):
            load(path, Outer)


def test_what_may_never_end_is_not_read(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), folder):
        with pytest.raises(ConfigError, match="is not a regular file"):
            load(path, Outer)
        with pytest.raises(ConfigError, match="is not a regular file"):
            read_files(Tls(path, path, path))


def test_a_flag_below_a_value_that_is_no_table_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a table"):
        load(write(tmp_path, "scan = 3\n"), Outer, {"scan.enabled": True})


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        setattr(Outer(), "listen", "x")  # noqa: B010 - the type checker knows it is frozen


@given(st.integers(0, 1 << 50))
def test_a_size_written_with_or_without_a_unit_is_the_same(size: int) -> None:
    assert (
        parse_size(size)
        == parse_size(f"{size}")
        == parse_size(f"{size} B")
        == parse_rate(f"{size}B/s")
        == size
    )
    assert parse_size(f"{size % 1024}KiB") == size % 1024 * 1024


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("30", 30), ("30s", 30), ("15m", 900), ("2h", 7200), ("7d", 604800)],
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:9896", ("127.0.0.1", 9896)),
        ("[::1]:0", ("::1", 0)),
        ("dn-1.example:65535", ("dn-1.example", 65535)),
    ],
)
def test_an_address_has_a_host_and_a_port(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize(
    "address",
    [
        "",
        "9896",
        ":9896",
        "host",
        "host:",
        "host:-1",
        "host:65536",
        "::1:9896",
        "h:1 ",
        "a b:80",
        "a\n:80",
    ],
)
def test_what_is_no_address_is_a_config_error(address: str) -> None:
    with pytest.raises(ConfigError, match="expected an address such as"):
        split_address(address)


@pytest.mark.parametrize(("value", "rate"), [("0.5", 1), (0.9, 1), ("0", 0), ("0.0KiB/s", 0)])
def test_a_rate_below_one_is_not_no_limit(value: float | str, rate: int) -> None:
    assert parse_rate(value) == rate
