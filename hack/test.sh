#!/usr/bin/env bash
# Runs the tests in turns, so that a cold build of the control plane costs no waiting and timing tests have the machine for themselves:
#   1. unit and live tests, then jobs of this machine, while hack/cluster builds in the background   2. those that need it, four at a time
#   3. marked `serial`, one at a time
# PSJOB_MARKS=EXPRESSION runs only what matches, in one turn. ARGS holds further words for pytest.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
CACHE=${PSJOB_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/psjob-dev}
LOG=$CACHE/build.log
STATUS=0
FLAKY=()
# More failures than so many are no accident of timing and are not tried again.
RETRIED=3
# Workers share two cores: one thread a process.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

main() {
  mkdir -p "$CACHE"
  build >"$LOG" 2>&1 &
  local builder=$!
  trap 'kill $builder 2>/dev/null || true' INT TERM
  if [ -n "${PSJOB_MARKS:-}" ]; then
    finish_build $builder
    turn "$PSJOB_MARKS" tests -m "$PSJOB_MARKS"
  else
    turn "unit and live" tests/unit tests/simulation tests/live -n 2 -m "not soak and not serial"
    # Files in their order here and below: by their number of tests the longest would be the last, and one worker would wait for it.
    turn "jobs" tests/e2e tests/scripts tests/frameworks tests/docs -n 2 --dist loadfile --no-loadscope-reorder -m "not soak and not serial and not e2e_long"
    finish_build $builder
    # They wait more than they compute.
    turn "control plane" tests/integration tests/load -n 4 --dist loadfile --no-loadscope-reorder -m "not soak and not serial"
    turn "alone on the machine" tests/e2e -m "serial and not soak and not e2e_long"
  fi
  if [ ${#FLAKY[@]} -gt 0 ]; then printf '\nfailed once and passed alone, in the turn: %s\n' "${FLAKY[@]}"; fi
  return $STATUS
}

build() { # everything the cluster tests need that is not in .venv; each step says what it lacks
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then nice python -m hack.cluster deps || echo "some Debian packages are missing"; fi
  nice python -m hack.cluster build || return
  if [ "$(id -u)" = 0 ]; then nice python -m hack.cluster build-images || echo "the Dockerfile's images could not be built"; fi
}

finish_build() {
  if kill -0 "$1" 2>/dev/null; then echo "waiting for the test control plane to be built (the first time takes minutes; log: ${LOG/#$HOME/\~})"; fi
  if ! wait "$1"; then
    echo "the test control plane could not be built; the tests that need it will say so. The end of its log:"
    tail -n 15 "$LOG"
  fi
}

turn() { # name, then pytest's words; a turn without tests is no failure, and what fails is tried once more, alone
  local name=$1 rc; shift
  echo "== $name"
  local words=(-o "cache_dir=.pytest_cache/turn")
  rm -rf .pytest_cache/turn
  # shellcheck disable=SC2086
  python -m pytest "$@" "${words[@]}" ${ARGS:-}
  rc=$?
  if [ $rc -eq 1 ] && [ "$(failures)" -le "$RETRIED" ]; then
    echo "== $name: once more, alone, what failed (a second failure counts; a first one is a race to find: see CONTRIBUTING.md)"
    # shellcheck disable=SC2086
    python -m pytest "$@" "${words[@]}" ${ARGS:-} -n 0 --last-failed --last-failed-no-failures none -rpf
    rc=$?
    [ $rc -eq 0 ] && FLAKY+=("$name")
  fi
  if [ $rc -ne 0 ] && [ $rc -ne 5 ]; then STATUS=1; fi
}

failures() { # how many tests of the turn failed
  python -c 'import json; print(len(json.load(open(".pytest_cache/turn/v/cache/lastfailed"))))' 2>/dev/null || echo 999
}

main "$@"
