#!/usr/bin/env bash
# Makes .venv as the hash-pinned requirements say; a second call with nothing changed ends at once.
# Nothing is installed outside .venv and the caches: uv is used from PATH, else from an environment of its own under ~/.cache/psjob-dev.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HOME=${HOME:-$(echo ~)} # some containers have none set
CACHE=${PSJOB_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/psjob-dev}
STAMP=.venv/.psjob-installed
SUPPORTED="Python 3.11, 3.12, 3.13 or 3.14"

main() {
  local want; want=$(fingerprint)
  if [ -z "${PYTHON:-}" ] && [ "$(cat "$STAMP" 2>/dev/null || true)" = "$want" ]; then return 0; fi
  local python; python=$(find_python)
  local uv; uv=$(find_uv "$python")
  if supported .venv/bin/python >/dev/null; then
    same_minor "$python"
    if [ "$(cat "$STAMP" 2>/dev/null || true)" = "$want" ]; then return 0; fi
  else
    echo "making .venv with Python $(supported "$python") of $python"
    "$uv" venv -q --clear --python "$python" .venv
  fi
  .venv/bin/python -m hack.packages "$uv"
  printf '%s' "$want" >"$STAMP"
}

fingerprint() { # what the environment depends on: pins, package metadata, the scripts that make it, the place of the checkout and a GPU
  {
    pwd
    cat requirements/dev.txt requirements/tools.txt {operator,runtime,client}/pyproject.toml hack/install.sh hack/packages.py hack/tools.py
    echo "${PSJOB_GPU:-}"
    ls /dev/nvidiactl /dev/dxg 2>/dev/null || true
  } | cksum
}

find_python() { # the one that PYTHON names; else that of .venv, python3, the newest on PATH; else one that uv has or brings
  local candidate version found=""
  # shellcheck disable=SC2086
  for candidate in ${PYTHON:-.venv/bin/python python3 python3.14 python3.13 python3.12 python3.11 python}; do
    if version=$(supported "$candidate"); then
      "$candidate" -c 'import sys; print(sys.executable)'; return
    elif [ -n "$version" ]; then
      found="$found, $candidate is $version"
    fi
  done
  found=${found#, }
  if [ -z "${PYTHON:-}" ] && command -v uv >/dev/null; then
    uv python find -q --system '>=3.11,<3.15' 2>/dev/null && return
    echo "no $SUPPORTED is on PATH (${found:-no other either}); uv installs 3.11 for itself" >&2
    if uv python install -q 3.11 >&2; then uv python find -q --system 3.11 && return; fi
  fi
  if [ -n "${PYTHON:-}" ]; then
    echo "PYTHON=$PYTHON: ${found:-it does not run}; psjob is developed on $SUPPORTED; name one of them: make install PYTHON=/path/to/python3.12" >&2
  else
    echo "psjob is developed on $SUPPORTED; found: ${found:-none}. Install one of them, or put uv on PATH, which brings one," \
      "or name it: make install PYTHON=/path/to/python3.12" >&2
  fi
  return 1
}

supported() { # prints the version of a Python, whatever it is; false where it is none of SUPPORTED
  "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3]); sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null
}

same_minor() { # refuses to keep a .venv of another Python than the one that PYTHON names
  local have want
  have=$(supported .venv/bin/python) want=$(supported "$1")
  if [ "${have%.*}" != "${want%.*}" ]; then
    echo ".venv has Python $have, and PYTHON=$PYTHON is $want; to change it: make clean install PYTHON=$PYTHON" >&2
    return 1
  fi
}

find_uv() {
  # --excludes came with uv 0.9; an older one is left alone.
  if command -v uv >/dev/null && uv pip install --help 2>/dev/null | grep -q -- --excludes; then command -v uv; return; fi
  local home=$CACHE/uv-0.11
  if [ ! -x "$home/bin/uv" ]; then
    mkdir -p "$CACHE"; rm -rf "$home"
    if ! "$1" -m venv "$home" >/dev/null 2>&1; then # Debian and Ubuntu keep venv in a package of its own
      rm -rf "$home"
      echo "$1 cannot make a virtual environment; install its venv module (Debian and Ubuntu: apt-get install python3-venv) or put uv on PATH" >&2
      return 1
    fi
    "$home/bin/python" -m pip install -q --disable-pip-version-check --require-hashes -r requirements/uv.txt >&2
  fi
  echo "$home/bin/uv"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then main "$@"; fi
