# Two images: `operator` runs psjob-operator; `runtime` carries the library that is copied into training pods.
#   docker build --target operator -t psjob-operator:0.1.0 .
#   docker build --target runtime  -t psjob-runtime:0.1.0  .
ARG PYTHON=python:3.11-slim-bookworm

# Packages and code are layers of their own: a new version of the operator alone is a small pull.
FROM ${PYTHON} AS packages
COPY requirements/operator.txt operator.txt
RUN python3 -m pip install --no-cache-dir --no-compile --require-hashes --target /operator -r operator.txt \
    && python3 -m compileall -q /operator && chmod -R a+rX /operator

FROM ${PYTHON} AS code
COPY operator/src/psjob_operator /operator/psjob_operator
RUN python3 -m compileall -q /operator && chmod -R a+rX /operator

FROM ${PYTHON} AS layout
RUN apt-get update -q && apt-get install -qy --no-install-recommends busybox-static && rm -rf /var/lib/apt/lists/*
COPY runtime/src/psjob /psjob-runtime/lib/psjob
# sh is what the injected command starts with, so that an image without a shell works too.
RUN mkdir /psjob-runtime/bin && cp /bin/busybox /psjob-runtime/bin/busybox && ln -s busybox /psjob-runtime/bin/sh \
    && find /psjob-runtime -name __pycache__ -prune -exec rm -rf {} + \
    && chmod -R u=rwX,go=rX /psjob-runtime

# The init container of a training pod runs `/psjob-runtime/bin/busybox cp -R /psjob-runtime/. /psjob` as the pod's user;
# /psjob is then an emptyDir with bin/sh and lib/psjob. No torch: that is the user's image's. render/ knows these paths.
FROM scratch AS runtime
COPY --from=layout /psjob-runtime /psjob-runtime
USER 65532:65532
ENTRYPOINT ["/psjob-runtime/bin/busybox"]

FROM ${PYTHON} AS operator
COPY --from=packages /operator /operator
COPY --from=code /operator /operator
ENV PYTHONPATH=/operator PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python3", "-m", "psjob_operator"]
CMD ["run"]
