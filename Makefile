# Every target sets up what it needs on first use; nothing but python3, pip and make has to be there.
# (`make bench` also measures Open MPI where mpirun is installed.)
PYTHON ?= python3
VENV := .venv
BENCH := .venv-bench
PEERS := .venv-peers
DOCS := .venv-docs
N ?= 4
# A third of the seconds of a test is the processor's, the rest is waiting (measured over the suite:
# 421 of 1,338 s), so three workers for a core. A worker that has nothing left takes from the others.
WORKERS ?= 6
# Of torch's own tests of RPC, run only every so many-th.
EVERY_RPC ?= 1
# CI runs a failed test once more, alone: RETRY='python3 tools/retry_failed.py'.
RETRY ?=
SUITE = $(VENV)/bin/pytest --quiet --overview -n $(WORKERS) --dist worksteal
TORCH_TESTS := tests/codec/test_tensors.py \
	tests/backends/test_torch_arrays.py tests/test_what_can_i_send.py \
	tests/collectives/test_tensor_operands.py tests/collectives/test_gloo_equality.py \
	tests/rendezvous/test_schedulers.py tests/torch_programs

.PHONY: help demo test test-all test-loaded check bench bench-services test-torch test-torch-suites docs what-we-hold nightly format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

$(VENV)/can-check: $(VENV)/ready
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[check]'
	touch $@

$(BENCH)/ready: pyproject.toml
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/pip install --quiet --disable-pip-version-check --editable '.[test,bench]'
	touch $@

$(PEERS)/ready: pyproject.toml
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --editable '.[test,peers]'
	touch $@

$(DOCS)/ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

demo: $(VENV)/ready  ## train a model with a parameter server on N=4 ranks of this machine
	$(VENV)/bin/rankwire run -n $(N) examples/parameter_server.py

test: $(VENV)/ready  ## run the tests but the slow ones (4 to 6 minutes on 2 cores, with set-up)
	TESTS_QUICK=1 $(SUITE) -m 'not slow'

test-all: $(VENV)/ready  ## run all tests, as CI does
	$(RETRY) $(SUITE)

test-loaded: $(VENV)/ready  ## run what `make test` runs beside two busy loops: it must pass there too
	@busy() { exec $(VENV)/bin/python -c 'while True: pass'; }; \
	busy & one=$$!; busy & two=$$!; trap "kill $$one $$two" EXIT; \
	TESTS_QUICK=1 $(SUITE) -m 'not slow'

check: $(VENV)/can-check  ## lint and type-check
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/basedpyright

bench: $(BENCH)/ready  ## measure against the peers, side by side; renews the tables and charts of the pages
	$(BENCH)/bin/python -m benchmarks.run
	$(BENCH)/bin/python -m benchmarks.collectives.run
	$(BENCH)/bin/python -m benchmarks.torch_backends
	$(BENCH)/bin/python -m benchmarks.torch_rpc
	$(BENCH)/bin/python -m benchmarks.update_pages

bench-services: $(PEERS)/ready  ## measure streams, group calls, pools and queues against Ray, gRPC and torch (6 minutes)
	$(PEERS)/bin/python -m benchmarks.streams
	$(PEERS)/bin/python -m benchmarks.group_calls
	$(PEERS)/bin/python -m benchmarks.pool
	$(PEERS)/bin/python -m benchmarks.queues

test-torch: $(BENCH)/ready  ## run the tests that need torch
	$(RETRY) $(BENCH)/bin/pytest $(TORCH_TESTS)

test-torch-suites: $(BENCH)/ready  ## run torch's own tests of its backends and of RPC on rankwire (7 minutes)
	$(BENCH)/bin/python tools/torch_suites.py
	$(BENCH)/bin/python tools/torch_suites.py --of rpc --every $(EVERY_RPC)
	$(BENCH)/bin/python tools/torch_suites.py --of rpc-pickle --every $(EVERY_RPC)

docs: $(DOCS)/ready  ## build the site into site/, strictly: links and names are checked
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet

what-we-hold: $(VENV)/ready  ## run the tests of faults and renew docs/faults-and-guarantees.md (needs root and iproute2)
	$(VENV)/bin/pytest -m fault --what-we-hold=.what-we-hold.json
	$(VENV)/bin/python tools/what_we_hold.py .what-we-hold.json docs/faults-and-guarantees.md

nightly: $(VENV)/ready  ## the same in nightly size, with a soak (TESTS_SOAK_MINUTES=5); about an hour
	TESTS_NIGHTLY=1 $(VENV)/bin/pytest -m 'fault or nightly' --what-we-hold=.what-we-hold.json
	$(VENV)/bin/python tools/what_we_hold.py .what-we-hold.json docs/faults-and-guarantees.md

format: $(VENV)/can-check  ## format the code
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:  ## remove the virtual environments and caches
	rm -rf $(VENV) $(BENCH) $(PEERS) $(DOCS) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
