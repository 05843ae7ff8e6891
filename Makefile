# What a machine lacks is installed by deploy/deps (as root, with apt) or named with the line that installs it.
# CONTRIBUTING.md says what each target is for.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
# One target at a time: cargo uses all cores by itself, and two cargos would only wait for each other.
.NOTPARALLEL:

TARGET := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)
# dev or release.
PROFILE ?= dev
BIN := $(TARGET)/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))
IMAGE ?= busybox
# Empty: every part.
BENCH ?=
# `--cycles N --vm-cycles N`; default 10000 and 200.
SOAK ?=
ENGINE ?= qemu
PREFIX ?= /usr
DESTDIR ?=
# Seconds after which `make test` ends itself.
TEST_LIMIT ?= 1500
# Seconds for each fuzz target.
FUZZ_TIME ?= 60

# The programs of a release. `tests` is not among them: it would bring its failpoints into the daemon.
PROGRAMS := --package sandboxd --package silkd --package sandbox-sdk --features sandbox-sdk/cli
# Everything, as the tests see it, in one build: programs, tests, examples.
ALL := --workspace --features sandbox-sdk/cli
NEXTEST := $(shell cargo nextest --version >/dev/null 2>&1 && echo yes)
# Neither root, QEMU nor apt.
QUICK := not (package(sandbox-tests) and (binary(guest) or binary(image) or binary(net)))

.PHONY: help deps build image demo lint test test-all test-quick test-build bench soak fuzz install clean

help:
	@echo 'deps build image demo lint test test-quick bench soak fuzz install clean; see CONTRIBUTING.md'

deps:
	deploy/deps build lint image vm test

build:
	deploy/deps build
	cargo build --locked --profile $(PROFILE) $(PROGRAMS)

image:
	deploy/deps build image $(if $(filter debian,$(IMAGE)),image-debian)
	deploy/image/build $(IMAGE) $(TARGET)/image/$(IMAGE)

demo: build
	deploy/deps image vm demo
	deploy/image/build busybox $(TARGET)/image/busybox
	deploy/demo --engine $(ENGINE) --bin $(BIN) --image $(TARGET)/image/busybox

lint:
	deploy/deps build lint
	cargo fmt --all --check
	for script in deploy/deps deploy/demo deploy/image/build deploy/image/agent deploy/image/recipes/*; do bash -n "$$script"; done
	cargo clippy --locked $(ALL) --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --locked $(ALL) --no-deps --document-private-items

# --foreground lets Ctrl-C through to the tests.
test:
	deploy/deps build image image-debian vm test
	timeout --foreground --kill-after=30 $(TEST_LIMIT) $(MAKE) --no-print-directory test-all

test-all: test-build
	deploy/image/agent $(TARGET)/image/agent
	SILKD=$(TARGET)/image/agent deploy/image/build busybox $(TARGET)/image/busybox
	SILKD=$(TARGET)/image/agent deploy/image/build debian $(TARGET)/image/debian
ifeq ($(NEXTEST),yes)
	cargo nextest run --locked $(ALL)
else
	cargo test --locked $(ALL) --lib --bins --tests --examples
endif
	cargo test --locked $(ALL) --doc

test-quick: test-build
ifeq ($(NEXTEST),yes)
	cargo nextest run --locked $(ALL) -E '$(QUICK)'
else
	cargo test --locked $(ALL) --lib --bins --examples
	cargo test --locked --package sandbox-tests --features sandbox-sdk/cli --test contract --test lifecycle --test crash
endif
	cargo test --locked $(ALL) --doc

# One build for all of it: --bins gives the programs that the tests start, with the features that the tests have.
test-build:
	deploy/deps build test
	cargo build --locked $(ALL) --lib --bins --tests --examples

bench:
	deploy/deps build image vm bench
	deploy/image/build busybox $(TARGET)/image/busybox
	cargo build --locked --release $(PROGRAMS)
	mkdir -p $(TARGET)/bench
	cargo run --locked --release --package sandbox-tests --bin sandbox-bench -- \
		--out $(TARGET)/bench --bin $(TARGET)/release --image $(TARGET)/image/busybox $(BENCH)

# The harness starts the programs that lie beside it.
soak:
	deploy/deps build image vm test
	deploy/image/build busybox $(TARGET)/image/busybox
	cargo build --locked --release --package sandbox-tests --bins
	$(TARGET)/release/sandbox-soak $(SOAK)

# --sanitizer none is what the stable toolchain runs.
fuzz:
	deploy/deps build fuzz
	cargo fuzz --version >/dev/null 2>&1 || cargo install --locked cargo-fuzz
	targets=$$(cargo fuzz list --fuzz-dir tests/fuzz); \
	[ -n "$$targets" ] || { echo 'fuzz: no targets' >&2; exit 1; }; \
	for target in $$targets; do \
		cargo fuzz run --fuzz-dir tests/fuzz --sanitizer none "$$target" -- -max_total_time=$(FUZZ_TIME) -print_final_stats=1; \
	done

install:
	deploy/deps build image
	cargo build --locked --release $(PROGRAMS)
	deploy/image/agent $(TARGET)/image/agent
	SILKD=$(TARGET)/image/agent deploy/image/build busybox $(TARGET)/image/busybox
	deploy/install --bin $(TARGET)/release --agent $(TARGET)/image/agent --image $(TARGET)/image/busybox \
		--prefix $(PREFIX) --destdir "$(DESTDIR)"

clean:
	cargo clean
