"""The container image: its steps are those of `make setup`, its base is pinned, and it
runs as nobody in particular.
"""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.long_running import LONG_RUNNING, ROOT, example_of

CONTAINERFILE = ROOT / "Containerfile"
LOCK, RUN_LOCK = ROOT / "requirements.lock", ROOT / "requirements-run.lock"
# What the installed package can be asked for besides tests.
EXTRAS = ("fast", "tls", "bucket", "postgres", "dashboard", "sweep")


def instructions() -> list[tuple[str, str]]:
    """Name and arguments of each instruction, in order."""
    text = re.sub(r"^#.*\n", "", CONTAINERFILE.read_text(), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    found = [line.split(maxsplit=1) for line in lines]
    return [(name, arguments) for name, arguments in found]


def arguments_of(name: str) -> list[str]:
    return [arguments for found, arguments in instructions() if found == name]


def test_hadolint_takes_it() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--failure-threshold", "style", CONTAINERFILE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_its_only_step_is_the_script_of_make_setup() -> None:
    (step,) = arguments_of("RUN")
    script = re.search(r"^\t@PYTHON=\$\(PYTHON\) (sh \S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert script is not None
    assert step == f"{script[1]} image /opt/treefold"
    assert "COPY --from=build /opt/treefold /opt/treefold" in CONTAINERFILE.read_text()


def test_its_base_is_small_pinned_and_one_that_we_support() -> None:
    bases = {arguments.split()[0] for arguments in arguments_of("FROM")}
    (base,) = bases
    match = re.fullmatch(r"docker\.io/library/python:3\.(\d+)\.\d+-slim-\w+", base)
    assert match is not None
    assert int(match[1]) >= 11
    # The reason why by tag only.
    assert "not by a digest" in CONTAINERFILE.read_text()


def test_it_runs_as_a_user_without_rights() -> None:
    (user,) = arguments_of("USER")
    uid, gid = user.split(":")
    assert int(uid) >= 1000
    assert int(gid) >= 1000
    names = [name for name, _ in instructions()]
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert arguments_of("ENTRYPOINT") == ['["treefold"]']


def test_it_names_the_ports_of_every_process() -> None:
    (ports,) = arguments_of("EXPOSE")
    named = [
        port
        for command in LONG_RUNNING
        for key in ("listen", "metrics")
        for port in re.findall(rf'^{key} = ".*:(\d+)"$', example_of(command).read_text(), re.M)
    ]
    assert sorted(ports.split()) == sorted(named)


def pinned(lock: Path) -> dict[str, str]:
    """The stanza of each requirement: versions, marks and hashes."""
    stanzas: dict[str, str] = {}
    for stanza in re.split(r"\n(?=[a-z])", lock.read_text()):
        name = stanza.split("==")[0]
        stanzas[name] = stanzas.get(name, "") + stanza.rstrip("\n")
    return stanzas


def test_what_runs_is_what_is_tested() -> None:
    everything, what_runs = pinned(LOCK), pinned(RUN_LOCK)
    assert {name: everything.get(name) for name in what_runs} == what_runs


def required(name: str) -> list[str]:
    """The requirements of a package; ours as they are written now, whatever is
    installed.
    """
    if name != "treefold":
        return requires(name) or []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [text for extra in EXTRAS for text in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *extras]


def test_what_runs_is_all_that_we_need_and_no_more() -> None:
    """The packages that ours requires, directly or not, and hatchling, which builds our
    wheel.
    """
    needed, waiting = set[str](), ["treefold", "hatchling"]
    while waiting:
        wanted = Requirement(waiting.pop())
        extras = wanted.extras or {""}
        for text in required(wanted.name):
            requirement = Requirement(text)
            mark = requirement.marker
            is_wanted = mark is None or any(mark.evaluate({"extra": extra}) for extra in extras)
            name = canonicalize_name(requirement.name)
            # One extra may be a part of another.
            if is_wanted and name not in {*needed, "treefold"}:
                needed.add(name)
                waiting.append(text.split(";")[0])
    assert set(pinned(RUN_LOCK)) == needed | {"hatchling"}


def test_what_is_not_sent_to_the_builder_is_not_in_the_wheel() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    built = {"deploy", "docs", "man", "tools", "README.md", "LICENSE", "requirements-run.lock"}
    assert not {line.strip("/") for line in ignored} & (built | {"admin", "runtime", "merkle"})
