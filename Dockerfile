# The command `mailroom`, as in compose.yaml: docker build --tag mailroom . && docker run --rm mailroom --help
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY alembic alembic
COPY mailroom mailroom
COPY outbox outbox
COPY inbox inbox
COPY dispatcher dispatcher
COPY benchmarks benchmarks
COPY examples examples
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --root-user-action=ignore /wheels/*.whl
RUN useradd --system --create-home mailroom
USER mailroom
ENV PYTHONUNBUFFERED=1
STOPSIGNAL SIGTERM
# Not through a shell, which would keep SIGTERM to itself.
ENTRYPOINT ["mailroom"]
CMD ["--help"]
