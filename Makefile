# Mailroom. `make` alone lists what there is. Every target makes the virtual environment itself if it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SPARK_STAMP := $(VENV)/.installed-spark
CODE := mailroom outbox inbox dispatcher spark_jobs benchmarks examples tests alembic

# Where the environment forbids it, each test process would rewrite the asserts of all modules anew: half of its collection.
unexport PYTHONDONTWRITEBYTECODE

# Test processes at once: they wait for their servers and for each other much of the time, so two cores have room for three.
JOBS ?= 3
# A few at a time, so that none is left with many when the others have ended.
SPREAD := -n $(JOBS) --maxschedchunk 5

# RUN=all: every case. REPORTS=DIR: a report of each run goes there. So `make check-all` calls the targets of the tests.
RUN ?=
REPORTS ?=
reported = $(if $(REPORTS),--junitxml $(REPORTS)/$(1).xml)

# These have targets of their own.
OF_OTHERS := --ignore tests/spark --ignore tests/wheel
OF_TEST := $(SPREAD) --run test $(OF_OTHERS)

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

# By uv and what it has in its cache, or else by pip.
INSTALL := $(BIN)/python tests/support/installing.py

$(STAMP): pyproject.toml benchmarks/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) dev
	@touch $@

# Apart, since it takes half a gigabyte.
$(SPARK_STAMP): $(STAMP)
	$(INSTALL) dev,spark
	@touch $@

.PHONY: venv
venv: $(STAMP) ## Make the virtual environment

.PHONY: demo
demo: $(STAMP) ## The main job on real data: 336,776 flights through an embedded PostgreSQL, verified; then through Spark
	$(BIN)/mailroom demo
	@if "$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version 2>&1 | grep -Eq 'version "(1[7-9]|[2-9][0-9])'; then $(MAKE) --no-print-directory pipeline; \
	  else echo "The second half, through Spark, needs Java 17: it is left out (make pipeline)"; fi

.PHONY: pipeline
pipeline: $(SPARK_STAMP) ## The same flights from a CSV through Spark, the outbox, the inbox, Parquet and Spark again, verified
	$(BIN)/python -m examples.pipeline

.PHONY: test
test: $(STAMP) ## The tests, without the slow ones and with a sample of many cases
	$(BIN)/python -m pytest $(OF_TEST)

# With Spark, which uv then has in its cache for the wheel's own environments.
.PHONY: test-wheel
test-wheel: $(SPARK_STAMP) ## Build the distributions, and try the wheel alone and with all extras in environments of their own
	$(BIN)/python -m pytest -n 2 --dist loadgroup tests/wheel --run $(or $(RUN),check) $(call reported,$@)

.PHONY: release-check
release-check: $(STAMP) ## All of a release but the upload, on each Python that is found: release/dist and release/sbom
	$(BIN)/python -m tests.release

# RUNLEVEL=1: Debian would start it as a service, and the tests start their own.
.PHONY: pgbouncer
pgbouncer: ## Install PgBouncer for its tests, where root and apt-get can; without it they are skipped
	@test -x /usr/sbin/pgbouncer || command -v pgbouncer >/dev/null \
	  || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null \
	  || { apt-get -qq update && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get -qq install -y pgbouncer; } >/dev/null \
	  || echo "PgBouncer could not be installed: its tests are skipped"

# Not as a service, as above; and without its web pages.
.PHONY: promtool
promtool: ## Install promtool for the tests of the alert rules, where root and apt-get can; without it they are skipped
	@command -v promtool >/dev/null \
	  || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null \
	  || { apt-get -qq update && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends prometheus; } >/dev/null \
	  || echo "promtool could not be installed: the tests of the alert rules are skipped"

# Where nothing but Maven Central has it. The folder's copy of the file that names the versions says that it is whole.
KAFKA := tests/support/kafka.pom.xml
SPARK_KAFKA := tests/support/spark_kafka.pom.xml
.PHONY: kafka
kafka: ## Fetch Apache Kafka for its tests by Maven into .kafka; without it or Java they are skipped
	@cmp -s $(KAFKA) .kafka/pom.xml \
	  || { rm -rf .kafka && mvn --quiet --batch-mode --file $(KAFKA) dependency:copy-dependencies \
	         -DincludeScope=runtime -DoutputDirectory="$(CURDIR)/.kafka" && cp $(KAFKA) .kafka/pom.xml; } >/dev/null 2>&1 \
	  || { rm -rf .kafka; echo "Apache Kafka could not be fetched by Maven (mvn): its tests are skipped"; }
	@cmp -s $(SPARK_KAFKA) .kafka/spark/pom.xml \
	  || { rm -rf .kafka/spark && mvn --quiet --batch-mode --file $(SPARK_KAFKA) dependency:copy-dependencies \
	         -DincludeScope=runtime -DoutputDirectory="$(CURDIR)/.kafka/spark" && cp $(SPARK_KAFKA) .kafka/spark/pom.xml; } >/dev/null 2>&1 \
	  || { rm -rf .kafka/spark; echo "Spark's source for Kafka could not be fetched by Maven (mvn): its test is skipped"; }

# Not as services, as above.
.PHONY: brokers
brokers: ## Install RabbitMQ and NATS for their tests, where root and apt-get can; without them they are skipped
	@test -x /usr/sbin/rabbitmq-server && test -x /usr/sbin/nats-server \
	  || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null \
	  || { apt-get -qq update && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends rabbitmq-server nats-server; } >/dev/null \
	  || echo "RabbitMQ and NATS could not be installed: their tests are skipped"

# TESTED=yes leaves out what `make test` has just run, as CI did. tests/support/sampling.py says what each run has.
TESTED ?=
.PHONY: test-check
test-check: $(STAMP) pgbouncer promtool kafka brokers ## The tests with the slow ones, and those about the server on every PostgreSQL found
	$(BIN)/python -m pytest $(SPREAD) --pg all --run $(if $(TESTED),beyond-test,$(or $(RUN),check)) $(call reported,$@) $(OF_OTHERS)

.PHONY: jdbc
jdbc: ## Install PostgreSQL's JDBC driver for Spark's tests, where root and apt-get can; without it they are skipped
	@test -f /usr/share/java/postgresql.jar || test -n "$$MAILROOM_JDBC_JAR" \
	  || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null \
	  || { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y libpostgresql-jdbc-java; } >/dev/null \
	  || echo "PostgreSQL's JDBC driver could not be installed: its tests are skipped"

# Those that share the session of Spark run in one process, the others beside them.
.PHONY: test-spark test-spark-session test-spark-beside
test-spark: $(SPARK_STAMP) jdbc ## The tests of the Spark writers and readers; without Java they are skipped
	@$(MAKE) --no-print-directory -j 2 --output-sync=target test-spark-session test-spark-beside
test-spark-session:
	$(BIN)/python -m pytest tests/spark --run $(or $(RUN),check) $(call reported,$@) -m spark_session
test-spark-beside:
	$(BIN)/python -m pytest tests/spark --run $(or $(RUN),check) $(call reported,$@) -m 'not spark_session'

# Clean, since its cache does not know of our extension; and never with -q, which hides that --strict has failed.
DOCS := $(BIN)/zensical build --clean --strict
.PHONY: docs
docs: $(STAMP) ## Build the site of docs/ into site/; a warning fails it, such as a link that leads nowhere
	$(DOCS)
	$(BIN)/python -m tests.search
	$(BIN)/python -m tests.site

.PHONY: lint
lint: $(SPARK_STAMP) docs ## Format, lint, types, import contracts, and the site of docs/
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The faults wait much of their time, and lint needs one core: side by side they take as long as the faults alone.
.PHONY: lint-and-faults
lint-and-faults: $(SPARK_STAMP)
	@$(MAKE) --no-print-directory -j 2 --output-sync=target lint faults

.PHONY: check
check: lint-and-faults test-check test-spark some-mutants ## Lint, one case of every rule, some mutants, the faults; CI runs test and test-wheel before it

# For nights, and before a release: hours. Its record is what `make release-check` asks for.
.PHONY: check-all
check-all: $(SPARK_STAMP) ## Lint, every test and case on every PostgreSQL found, all mutants, the faults; and a record of that
	$(BIN)/python -m tests.release.record

.PHONY: format
format: $(STAMP) ## Put the code into its format
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

.PHONY: bench
bench: $(STAMP) ## Measure, beside the limits of this machine
	$(BIN)/mailroom bench

NAME ?= deliver
.PHONY: sql
sql: $(STAMP) ## Print a hot statement (tests/sql) for psql, to EXPLAIN it by hand: NAME=deliver
	@$(BIN)/python -m tests.support.explain $(NAME)

.PHONY: mutants
mutants: $(SPARK_STAMP) ## Break each rule once and see its test fail
	$(BIN)/python -m tests.mutants

# SEED=7 repeats a run, or draws another one. What CI runs is drawn the same way each time.
SEED ?=
CI_SEED := $(or $(SEED),1)
.PHONY: some-mutants
some-mutants: $(SPARK_STAMP) ## The same with six rules
	$(BIN)/python -m tests.mutants --some 6 --seed $(CI_SEED)

# The server is killed, paused, cut off and run out of disk under load; as root more of it. How many kinds of faults fit in
# depends on the machine, so it goes on until there were as many as the floor.
FAULTS := $(BIN)/python -m tests.faults $(if $(SEED),--seed $(SEED))
.PHONY: faults
faults: $(STAMP) pgbouncer ## Break a node under load for some minutes, and hold its ledgers against the guarantees
	$(BIN)/python -m tests.faults --seconds 90 --unknown 200 --floor 5 --seed $(CI_SEED)

.PHONY: disasters
disasters: ## Install what power cuts and jumps of the clock need, where root and apt-get can; without it they are skipped
	@command -v mkfs.btrfs >/dev/null && command -v faketime >/dev/null \
	  || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null \
	  || { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y btrfs-progs faketime; } >/dev/null \
	  || echo "btrfs-progs and faketime could not be installed: their faults are skipped"

SOAK_S ?= 1800
.PHONY: soak
soak: $(STAMP) pgbouncer disasters ## The same for SOAK_S=1800, with every kind of fault
	$(FAULTS) --seconds $(SOAK_S) --unknown 1000 --floor 29 --most-waiting 3000

.PHONY: spark-soak
spark-soak: $(SPARK_STAMP) ## Kill drivers, tasks, executors, sessions and the server under Spark's writers for SOAK_S=1800
	$(BIN)/python -m tests.spark.campaign --seconds $(SOAK_S) $(if $(SEED),--seed $(SEED))

.PHONY: links-soak
links-soak: $(STAMP) ## Break two nodes, and then three, that read each other, for SOAK_S=1800
	$(BIN)/python -m tests.faults.links --seconds $(SOAK_S) $(if $(SEED),--seed $(SEED))

.PHONY: bridges-soak
bridges-soak: $(STAMP) kafka brokers ## Break two nodes and the brokers between them for SOAK_S=1800
	$(BIN)/python -m tests.faults.bridges --seconds $(SOAK_S) $(if $(SEED),--seed $(SEED))

AWAY_S ?= 600
.PHONY: bridges-away
bridges-away: $(STAMP) kafka ## Take the broker away under load for AWAY_S=600: nothing but the bridge may notice
	$(BIN)/python -m tests.faults.bridges.away --seconds $(AWAY_S)

DOCTOR_MINUTES ?= 10
.PHONY: doctor-soak
doctor-soak: $(STAMP) pgbouncer promtool ## Break a node in 20 ways: the doctor or an alert names each, and nothing for DOCTOR_MINUTES=10 without
	$(BIN)/python -m tests.doctor.soak --minutes $(DOCTOR_MINUTES)

.PHONY: fault-mutants
fault-mutants: $(STAMP) kafka ## Break rules of Mailroom in the processes of a campaign: its checker has to notice each
	$(FAULTS) --mutants
	$(BIN)/python -m tests.faults.links --mutants
	$(BIN)/python -m tests.faults.bridges --mutants

# TESTS=tests/worker is for a part of them. SEED=7 draws another lot.
TIMES ?= 3
TESTS ?=
.PHONY: hunt
hunt: $(STAMP) ## Run the tests TIMES=3 on a machine that is too busy, whose processes are stopped at random: who passes by chance?
	$(BIN)/python -m tests.hunt --times $(TIMES) --seed $(CI_SEED) -- $(OF_TEST) $(TESTS)

RUNS ?= 1000000
.PHONY: fuzz
fuzz: $(STAMP) ## Hostile bytes for the CBOR reader, RUNS=1000000 of them (needs the extra: fuzz)
	$(BIN)/python -m tests.fuzz.cbor --runs $(RUNS)

.PHONY: clean
clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) site .cache .durations .mypy_cache .ruff_cache .hypothesis .import_linter_cache
