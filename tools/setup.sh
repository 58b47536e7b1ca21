#!/bin/sh
# Make .venv with exactly what requirements.lock names. Installs the one Debian package it may lack, when it may.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

need() {  # need PACKAGE: install a Debian package, or say how
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "setup: installing $1" >&2
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$1" >/dev/null
    else
        echo "setup: $1 is missing; run: sudo apt-get install $1" >&2
        exit 1
    fi
}

command -v "$python" >/dev/null || need python3
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: Python 3.11 or newer is needed, $("$python" --version) was found; set PYTHON=..." >&2
    exit 1
}
"$python" -c 'import ensurepip, venv' 2>/dev/null || need python3-venv
[ -x .venv/bin/python ] || "$python" -m venv .venv
echo "setup: installing packages into .venv" >&2
.venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements.lock
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
