# The command `mailroom`, as in compose.yaml: docker build --tag mailroom . && docker run --rm mailroom --help
# Spark, with Mailroom on every machine of its cluster: docker build --tag mailroom-spark --target spark .
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY alembic alembic
COPY mailroom mailroom
COPY outbox outbox
COPY inbox inbox
COPY dispatcher dispatcher
COPY spark_jobs spark_jobs
COPY examples/flights examples/flights
COPY docs/errors docs/errors
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# Not Spark's own image, whose Python is older than ours. pyspark holds all of Spark, its master and worker too.
FROM python:3.12-slim AS spark
RUN apt-get update \
    && apt-get install --yes --no-install-recommends default-jre-headless libpostgresql-jdbc-java \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --root-user-action=ignore "$(echo /wheels/*.whl)[spark]"
# The jobs where spark-submit is told them without this Python's version; the driver for JDBC where each session has it.
RUN packages="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
    && ln -s "$packages/spark_jobs" /jobs \
    && ln -s /usr/share/java/postgresql.jar "$packages/pyspark/jars/"
# A new volume has the owner of what stands in its place.
RUN useradd --system --create-home mailroom && install --directory --owner=mailroom /files
USER mailroom
WORKDIR /home/mailroom
ENV PYTHONUNBUFFERED=1 PYSPARK_PYTHON=python3 SPARK_WORKER_DIR=/home/mailroom/work
STOPSIGNAL SIGTERM
CMD ["spark-submit", "--help"]

# The last one, so that it is what a build makes which names no target.
FROM python:3.12-slim AS mailroom
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --root-user-action=ignore /wheels/*.whl
RUN useradd --system --create-home mailroom
USER mailroom
ENV PYTHONUNBUFFERED=1
STOPSIGNAL SIGTERM
# Not through a shell, which would keep SIGTERM to itself.
ENTRYPOINT ["mailroom"]
CMD ["--help"]
