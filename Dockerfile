# One image for both roles: `docker run ferrorpc coordinator ...`, or a worker with `ferrorpc run` or a script of its own.
#
#   docker build -t ferrorpc .                                                the released base, packages from an index
#   docker build --build-arg EXTRAS=examples -t ferrorpc-digits .             with the libraries of the examples
#   docker build --build-arg EXTRAS=examples,gpu -t ferrorpc-gpu .            with CUDA too, from wheels: any base will do
#   docker build --build-arg BASE=... --build-arg WHEELHOUSE=wheelhouse .     without an index: wheels from ./wheelhouse
#
# The status page and /metrics (the extra ui) are always in it. It runs without root, and with a tmpfs at /tmp on a read-only
# root filesystem.
# There is no HEALTHCHECK here: a worker would inherit it. The coordinator's check is in docker-compose.yml.

ARG BASE=python:3.12-slim

FROM ${BASE} AS build
ARG EXTRAS=
ARG WHEELHOUSE=
WORKDIR /source
# The pattern also matches nothing, so that the folder is only needed where WHEELHOUSE names it.
COPY LICENSE wheelhous[e] /wheelhouse/
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY services services
COPY examples examples
COPY ferrorpc ferrorpc
RUN python3 -m venv /opt/ferrorpc \
 && /opt/ferrorpc/bin/python -m pip install --no-cache-dir --disable-pip-version-check \
    ${WHEELHOUSE:+--no-index --find-links /wheelhouse} ".[ui${EXTRAS:+,${EXTRAS}}]"

FROM ${BASE}
RUN groupadd --gid 10001 ferrorpc \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/ferrorpc ferrorpc \
 && install -d -o ferrorpc -g ferrorpc /var/lib/ferrorpc
COPY --from=build /opt/ferrorpc /opt/ferrorpc
COPY --from=build /source/examples /opt/ferrorpc/examples
# Examples are started by name: `python -m digits_ddp`.
ENV PATH=/opt/ferrorpc/bin:$PATH PYTHONPATH=/opt/ferrorpc/examples PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /var/lib/ferrorpc
EXPOSE 29700 29701
STOPSIGNAL SIGTERM
ENTRYPOINT ["ferrorpc"]
CMD ["--help"]
