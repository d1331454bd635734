# Two images: `operator` runs psjob-operator; `runtime` carries the library that is copied into training pods.
#   buildah bud --layers --timestamp=$(git log -1 --format=%ct) --target=operator --tag=psjob-operator:0.1.0 .
#   buildah bud --layers --timestamp=$(git log -1 --format=%ct) --target=runtime  --tag=psjob-runtime:0.1.0  .
# Built twice from one commit and the same packages they are the same bytes; docs/releasing.md tells how to renew the digest.
ARG PYTHON=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

# Packages and code are layers of their own: a new version of the operator alone is a small pull.
# Compiled files name no times: those of an image's files are all the same. A fixed seed fixes the order of sets in them.
FROM ${PYTHON} AS packages
COPY requirements/operator.txt operator.txt
RUN python3 -m pip install --no-cache-dir --no-compile --require-hashes --target /operator -r operator.txt && rm -rf /operator/bin \
    && PYTHONHASHSEED=0 python3 -m compileall -q --invalidation-mode unchecked-hash /operator && chmod -R a+rX /operator

FROM ${PYTHON} AS code
COPY operator/src/psjob_operator /operator/psjob_operator
RUN PYTHONHASHSEED=0 python3 -m compileall -q --invalidation-mode unchecked-hash /operator && chmod -R u=rwX,go=rX /operator

# Python and what it loads. The base's shell, package managers and other programs stay behind.
FROM packages AS python
COPY hack/image/root.py root.py
RUN python3 -B root.py python /root.d /operator && cd /root.d \
    && PYTHONHASHSEED=0 python3 -m compileall -q --invalidation-mode unchecked-hash -s /root.d -p / "/root.d$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"

FROM ${PYTHON} AS layout
# The base's own release has this one; the star stands for a rebuild of it for one architecture.
ARG BUSYBOX=1:1.35.0-4+deb12u1*
RUN apt-get update -q && { apt-get install -qy --no-install-recommends "busybox-static=${BUSYBOX}" \
    || { echo "psjob: this base's mirror has no busybox-static ${BUSYBOX}; give --build-arg BUSYBOX one of these:" >&2; apt-cache policy busybox-static >&2; exit 1; }; } \
    && rm -rf /var/lib/apt/lists/*
COPY hack/image/root.py root.py
COPY runtime/src/psjob /root.d/psjob-runtime/lib/psjob
# sh is what the injected command starts with, so that an image without a shell works too.
RUN python3 -B root.py file /root.d /bin/busybox /psjob-runtime/bin/busybox && ln -s busybox /root.d/psjob-runtime/bin/sh \
    && find /root.d -name __pycache__ -prune -exec rm -rf {} + \
    && chmod -R u=rwX,go=rX /root.d

# The init container of a training pod copies /psjob-runtime to /psjob as the pod's user, and derives its keys with busybox alone;
# /psjob is then an emptyDir with bin/sh and lib/psjob. No torch: that is the user's image's. render/ knows these paths.
FROM scratch AS runtime
COPY --from=layout /root.d /
USER 65532:65532
ENTRYPOINT ["/psjob-runtime/bin/busybox"]

FROM scratch AS operator
COPY --from=python /root.d /
COPY --from=packages /operator /operator
COPY --from=code /operator /operator
ENV PATH=/usr/local/bin:/usr/bin:/bin PYTHONPATH=/operator PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python3", "-m", "psjob_operator"]
CMD ["run"]
