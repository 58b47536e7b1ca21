# Two commands do everything: `make demo` (the main job) and `make test`. Both set up .venv first.
# With PYTHON=..., .venv is made with that Python.
PYTHON ?=
BIN := .venv/bin
STAMP := .venv/.installed
# Without bytecode on disk each worker of the tests, and each process that they start, compiles all of them anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-tests demo test test-crashes test-long check format lint types protos man dashboard image wheel bench pictures test-ozone setup-peers test-peers lock clean

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## .venv with the package, its extras and the test tools

$(STAMP): requirements.lock pyproject.toml tools/setup.sh
	@PYTHON=$(PYTHON) sh tools/setup.sh
	@touch $@

demo: $(STAMP)  ## damage real Ozone replicas and heal them: controller and three agents on loopback
	@$(BIN)/treefold demo

setup-tests: $(STAMP)  ## Java 17, Chromium, systemd-analyze and groff, which only tests run
	@sh tools/setup.sh tests

# What these tests write nobody reads after them, and most is waited for until it is on disk: memory takes it, some 4 GB,
# where there is room for it and for the tests, and programs may run there.
IN_MEMORY = if [ "$$(df --output=avail /dev/shm 2>/dev/null | tail -n 1)" -gt 8000000 ] 2>/dev/null && \
	[ "$$(awk '/MemAvailable/ {print $$2}' /proc/meminfo)" -gt 16000000 ] && ! grep -q ' /dev/shm .*noexec' /proc/mounts; then export TMPDIR=/dev/shm; fi;
# Two runs at once, since either waits at times: all tests, by group (all that is Spark's shares one JVM); and those that
# reach a kernel a second time without numba, whose output comes last.
test: setup-tests  ## all tests; those that reach a kernel a second time without numba
	@$(IN_MEMORY) said=$$(mktemp); $(BIN)/python -m pytest -q -m kernels -p tests.support.without_numba tests/unit tests/golden >$$said 2>&1 & \
	again=$$!; trap "kill $$again 2>/dev/null; rm -f $$said" EXIT; status=0; \
	$(BIN)/python -m pytest -n 6 --dist loadgroup -m "not crashes and not ozone and not peers and not long" tests || status=1; \
	wait $$again || status=1; cat $$said; exit $$status

test-crashes: setup-tests  ## what a crash or a kill at any moment leaves, and whether storms find planted bugs
	@$(IN_MEMORY) $(BIN)/python -m pytest -n 4 --dist loadgroup -m "crashes and not ozone and not peers and not long" tests

# The second part where `make test-ozone` can run, too.
test-long: $(STAMP)  ## 100,000 nearly valid inputs for every parser and port, laws by new examples; 200 kills between real Ozone clusters
	$(BIN)/python -m pytest -v -n 2 -m "long and not ozone" tests
	$(BIN)/python -m pytest -q -n 2 -m "not long" --hypothesis-profile=long tests/property
	@if command -v mvn >/dev/null; then $(BIN)/python -m pytest -v -m "long and ozone" tests/e2e; fi

check: format lint types test  ## all that has to hold before a change lands

format: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

protos:  ## generate protos/*_pb2* anew
	@test -x .venv-protos/bin/python || $(or $(PYTHON),python3) -m venv .venv-protos
	# The oldest compiler whose modules load under protobuf 4.25 to 7: newer ones demand their own runtime.
	@.venv-protos/bin/python -m pip install -q grpcio-tools==1.62.3 'setuptools<81'
	.venv-protos/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto
	sha256sum protos/*.proto > protos/generated.sha256

man: $(STAMP)  ## man/*.1 anew, from the help of the commands
	$(BIN)/python -m tools.man_pages

dashboard: $(STAMP)  ## deploy/grafana/treefold.json anew, from the tables of metrics
	$(BIN)/python -m tools.dashboard

# Whichever there is.
BUILDER = $(shell command -v podman || echo docker)
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
image:  ## the container image treefold:VERSION (wants podman or docker)
	$(BUILDER) build --file Containerfile --tag treefold:$(VERSION) .

wheel: $(STAMP)  ## dist/treefold-VERSION-py3-none-any.whl
	$(BIN)/python -m hatchling build -t wheel -d dist

bench: $(STAMP)  ## every benchmark once
	@for bench in benchmarks/bench_*.py; do $(BIN)/python -m benchmarks.$$(basename $$bench .py) || exit 1; done

# The part of the page that fits a screen; the folder of the browser's profile goes with the rest.
SHOOT = chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --force-device-scale-factor=0.75 --window-size=1180,1900 \
	--user-data-dir=build/report/profile 2>build/report/said
pictures: $(STAMP)  ## the pictures of README.md anew, from the demos (wants Chromium)
	$(BIN)/treefold demo --check --svg docs/healed.svg
	$(BIN)/treefold bucket demo --check --svg docs
	$(BIN)/python -m tools.page_pictures
	@rm -rf build/report && mkdir -p build
	$(BIN)/treefold sweep demo --engine local --keep build/report
	@set -e; page=$$(ls $$PWD/build/report/sweeps-local/report/*/report.html | tail -n 1); \
	$(SHOOT) --screenshot=docs/report-light.png "file://$$page"; \
	$(SHOOT) --blink-settings=preferredColorScheme=0 --screenshot=docs/report-dark.png "file://$$page"
	@rm -rf build/report

# Two runs at once, since either waits at times, with clusters of their own: the tests of datanodes and some others, so
# that both take as long, whose output comes last; and those of the OM and its gateway.
OZONE_TESTS = $(BIN)/python -m pytest tests/e2e tests/contract -m "ozone and not long and
test-ozone: $(STAMP)  ## the tests against real Ozone clusters on loopback (wants Maven and Java 17)
	@said=$$(mktemp); OZONE_PORT_OFFSET=8000 $(OZONE_TESTS) datanodes" >$$said 2>&1 & \
	other=$$!; trap "kill -INT $$other 2>/dev/null; wait $$other; rm -f $$said" EXIT; status=0; \
	$(OZONE_TESTS) not datanodes" || status=1; \
	wait $$other || status=1; cat $$said; exit $$status

setup-peers: $(STAMP)  ## Ceph and PostgreSQL, which only test-peers runs (Debian packages; wants root)
	@sh tools/setup.sh peers

# Two runs at once: those of syncers wait most of the time. All tests of `make test` share one Spark on one machine: those
# of its server and of its clusters are here.
PEER_TESTS = $(BIN)/python -m pytest tests/e2e tests/contract -m "peers and
test-peers: setup-peers  ## the tests against two real Ceph stores, PostgreSQL and a cluster of Spark, and of syncers that are killed
	@said=$$(mktemp); $(PEER_TESTS) spark" >$$said 2>&1 & \
	spark=$$!; trap "kill -INT $$spark 2>/dev/null; wait $$spark; rm -f $$said" EXIT; status=0; \
	$(PEER_TESTS) not spark" || status=1; \
	wait $$spark || status=1; cat $$said; exit $$status

COMPILE = $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --upgrade
lock: $(STAMP)  ## resolve requirements.lock anew, and its part that runs in a container
	$(BIN)/python -m pip install -q uv
	$(COMPILE) pyproject.toml --extra connect --extra dashboard --extra fast --extra postgres --extra test -o requirements.lock
	# With what builds our wheel; time zones come with the system.
	echo hatchling | $(COMPILE) pyproject.toml --extra dashboard --extra fast --extra postgres --extra sweep --no-emit-package tzdata - -c requirements.lock -o requirements-run.lock

clean:
	rm -rf .venv .venv-protos build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
