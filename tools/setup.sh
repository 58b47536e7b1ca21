#!/bin/sh
# Make .venv with exactly what requirements.lock names; with the arguments `image FOLDER`, make FOLDER with what runs in a
# container: exactly what requirements-run.lock names, neither tests nor Spark, and the package itself, not a link to it.
# With the argument `tests`, see to what only tests run: Java for Spark, a browser for the report, what checks our units,
# and what sets manual pages; with the argument `peers`, see to Ceph and PostgreSQL, which only `make test-peers` runs.
# Installs the Debian packages that it lacks, when it may.
set -eu
cd "$(dirname "$0")/.."

quickest() {  # the first Python in PATH, or the system's where that is a tenth quicker: many are built unoptimised
    for found in python3 /usr/bin/python3; do
        "$found" -c '
import ensurepip, sys, timeit, venv
if sys.version_info >= (3, 11):
    loop = min(timeit.repeat("sum(i * i & 7 for i in range(99999))", number=1, repeat=9))
    print(loop * (0.9 if sys.argv[1] == "python3" else 1), sys.argv[1])' "$found" 2>/dev/null || true
    done | LC_ALL=C sort -g | sed -n '1s/.* //p'
}

need() {  # need PACKAGE...: install Debian packages, or say how
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "setup: installing $*" >&2
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null
    else
        echo "setup: missing; run: sudo apt-get install $*" >&2
        exit 1
    fi
}

if [ "${1:-}" = tests ]; then
    # Whichever Java Spark's own scripts would take.
    "${JAVA_HOME:+$JAVA_HOME/bin/}java" -version 2>&1 | grep -qE 'version "(1[7-9]|[2-9][0-9])' || need openjdk-17-jre-headless
    command -v chromium >/dev/null || need chromium
    command -v systemd-analyze >/dev/null || need systemd
    command -v groff >/dev/null || need groff
    .venv/bin/python -m tests.support.java &
    # Otherwise each worker of the first run compiles all tests.
    if [ -z "$(ls tests/unit/__pycache__/*pytest*.pyc 2>/dev/null)" ]; then
        echo "setup: compiling tests" >&2
        .venv/bin/python -m pytest -q --collect-only tests >/dev/null || true
    fi
    wait
    exit
fi

if [ "${1:-}" = peers ]; then
    # Debian's server starts by itself where systemd runs; tests start servers of their own.
    [ -n "$(ls /usr/lib/postgresql/*/bin/postgres 2>/dev/null)" ] || need --no-install-recommends postgresql
    for tool in ceph ceph-mon ceph-osd radosgw radosgw-admin ceph-authtool monmaptool uuidgen curl; do
        command -v "$tool" >/dev/null || {
            # Without what is recommended it is a quarter: no manager, no dashboard.
            need --no-install-recommends ceph-mon ceph-osd radosgw ceph-common uuid-runtime curl
            break
        }
    done
    exit
fi

python=${PYTHON:-$(quickest)}
python=${python:-python3}
command -v "$python" >/dev/null || need python3
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: Python 3.11 or newer is needed, $("$python" --version) was found; set PYTHON=..." >&2
    exit 1
}
"$python" -c 'import ensurepip, venv' 2>/dev/null || need python3-venv
if [ "${1:-}" = image ]; then
    folder=$2 lock=requirements-run.lock source=.
    # Without a compiler crcmod is installed too, and is much slower.
    command -v cc >/dev/null || need gcc libc6-dev
else
    folder=.venv lock=requirements.lock source='--editable .'
fi
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
echo "setup: installing packages into $folder" >&2
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --use-pep517 \
    --requirement "$lock"
# shellcheck disable=SC2086  # two words
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation $source
if [ "$folder" = .venv ]; then
    # Once, and not by each process that starts before the first one is through.
    echo "setup: compiling modules and kernels" >&2
    "$folder/bin/python" -m compileall -q -x '/\.|/test_|/deploy/' .
    "$folder/bin/python" -c "import $(echo chunktable/*kernels.py merkle/*kernels.py proof/*kernels.py sweep/*kernels.py | sed 's#/#.#g; s#\.py##g; s# #, #g')" ||
        echo "setup: kernels cannot be compiled here; commands and tests do without" >&2
fi
