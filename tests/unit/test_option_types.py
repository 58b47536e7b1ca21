"""Numbers of options and settings have the digits 0 to 9, and reasons are one line that
can be stored, for every command and configuration that there is.
"""

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from admin.cli import treefold
from dnagent.config import AgentConfig
from replicator.verifier.config import VerifierConfig
from runtime.config import Settings
from runtime.setting_values import check_count, parse_duration, parse_rate, parse_size
from scm.config import ControllerConfig

NO_NUMBERS = ["\u0663", "\uff13", "\u00b2", "1_0", " 1", "1 ", "", "1e1", "0x1", "9" * 5000]


def options(
    command: click.Command, words: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Option]]:
    """The words of each command, and each of its options."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from options(below, (*words, name))
    yield from ((" ".join(words), one) for one in command.params if isinstance(one, click.Option))


def is_number(option: click.Option) -> bool:
    kinds = " ".join(kind.__name__ for kind in type(option.type).__mro__)
    return "IntParamType" in kinds or "FloatParamType" in kinds


ALL = list(options(treefold))
NUMBERS = [(words, option) for words, option in ALL if is_number(option)]
REPLICATION_ORDERS = {
    "add", "cancel", "change", "delete", "disable", "enable", "failback", "failover", "pause",
    "prefixes", "resume",
}  # fmt: skip
REASONS = [(words, "--reason") for words, option in ALL if "--reason" in option.opts]


def test_there_are_numbers_and_reasons() -> None:
    assert len(NUMBERS) >= 15
    of_replications = {f"bucket {word}" for word in REPLICATION_ORDERS}
    assert {words for words, _ in REASONS} == {
        "job pause", "job undo", "reconcile", *of_replications
    }  # fmt: skip


def test_an_option_takes_digits_from_0_to_9_alone() -> None:
    for words, option in NUMBERS:
        for text in NO_NUMBERS:
            with pytest.raises(click.BadParameter) as refusal:
                option.type.convert(text, option, click.Context(click.Command(words)))
            assert "number." in refusal.value.message, (words, option.opts, text)
            assert len(refusal.value.message) < 200


@pytest.mark.parametrize(("words", "name"), REASONS)
def test_a_reason_that_cannot_be_stored_is_refused_before_anything_is_asked(
    words: str, name: str
) -> None:
    for text in ("x" * 1001, "two\nlines", "\x1b[31m", "\u200b"):
        # There is nobody: whoever asks ends with 7.
        server = "--master" if words.startswith("bucket") else "--controller"
        asked = [*words.split(), "1", f"{name}={text}", server, "127.0.0.1:1"]
        result = CliRunner().invoke(treefold, asked)
        assert (result.exit_code, f"'{name}'" in result.stderr) == (2, True)


@pytest.mark.parametrize("parse", [parse_size, parse_rate, parse_duration])
@pytest.mark.parametrize(
    "text",
    ["\u0663", "\uff13MiB", "1/s/s", "1/s /s", "1\u00a0MiB", "1_0", "1e3", "\n1", "9" * 5000],
)
def test_a_quantity_that_is_none_is_quoted_as_it_was_given(parse: object, text: str) -> None:
    assert callable(parse)
    with pytest.raises(ValueError, match=r"^expected a ") as refusal:
        parse(text)
    assert repr(text)[:100] in str(refusal.value)
    assert len(str(refusal.value)) < 300


def counts(settings: type[Settings], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Each key that is a whole number, and what checks it."""
    for name, field in settings.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Settings):
            yield from counts(kind, f"{prefix}{name}.")
        elif kind is int:
            checks = [getattr(one, "func", None) for one in field.metadata]
            yield f"{prefix}{name}", next((one for one in checks if one), None)


@pytest.mark.parametrize("settings", [AgentConfig, ControllerConfig, VerifierConfig])
def test_a_count_in_a_configuration_is_a_whole_number(settings: type[Settings]) -> None:
    found = dict(counts(settings))
    assert found
    assert set(found.values()) <= {check_count, parse_size, parse_rate}
    for value in (True, "3", "\u0663", 3.0, None):
        with pytest.raises(ValueError, match="expected a whole number, found"):
            check_count(value)
