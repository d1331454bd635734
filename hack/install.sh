#!/usr/bin/env bash
# Makes .venv as the hash-pinned requirements say; a second call with nothing changed ends at once.
# uv is used from PATH, else from a small environment of its own under ~/.cache/psjob-dev, so python3.11 and make suffice.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
CACHE=${PSJOB_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/psjob-dev}
STAMP=.venv/.psjob-installed

main() {
  local want; want=$(fingerprint)
  if [ "$(cat "$STAMP" 2>/dev/null || true)" = "$want" ]; then return 0; fi
  local python; python=$(find_python)
  local uv; uv=$(find_uv "$python")
  [ -x .venv/bin/python ] || "$uv" venv -q --python "$python" .venv
  echo "installing the pinned requirements into .venv (torch is a few GB the first time)"
  # Compiled here once: where PYTHONDONTWRITEBYTECODE is set, each of the hundreds of processes that tests start would compile torch itself (5 s).
  "$uv" pip install -q --compile-bytecode --python .venv/bin/python --require-hashes -r requirements/dev.txt
  "$uv" pip install -q --python .venv/bin/python --no-deps --no-build-isolation -e operator -e runtime -e client
  .venv/bin/python hack/tools.py "$uv"
  printf '%s' "$want" >"$STAMP"
}

fingerprint() { # what the environment depends on: pins, package metadata, this script and the place of the checkout
  { pwd; cat requirements/dev.txt requirements/tools.txt operator/pyproject.toml runtime/pyproject.toml client/pyproject.toml hack/install.sh hack/tools.py; } | cksum
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3 python; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      "$candidate" -c 'import sys; print(sys.executable)'; return
    fi
  done
  echo "psjob is developed on Python 3.11 and none was found; install it, or name it: make install PYTHON=/path/to/python3.11" >&2
  return 1
}

find_uv() {
  if command -v uv >/dev/null; then command -v uv; return; fi
  local home=$CACHE/uv-0.11
  if [ ! -x "$home/bin/uv" ]; then
    mkdir -p "$CACHE"; rm -rf "$home"
    if ! "$1" -m venv "$home" >/dev/null 2>&1; then # Debian keeps venv in a package of its own
      if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        { apt-get update -q && apt-get install -qy python3-venv; } >&2
      fi
      rm -rf "$home"
      "$1" -m venv "$home" >&2 || { echo "Python has no venv module; install it (Debian: apt-get install python3-venv) or put uv on PATH" >&2; return 1; }
    fi
    "$home/bin/python" -m pip install -q --disable-pip-version-check --require-hashes -r requirements/uv.txt >&2
  fi
  echo "$home/bin/uv"
}

main "$@"
