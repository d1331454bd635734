#!/usr/bin/env bash
# Runs one tier of the tests: hack/test.sh unit|test|cluster|nodes|gpu|soak, or `rest`, which is what CI runs after `test`: cluster, nodes and a sixth
# of what rotates, collected once. `build` makes what they need. More words go to pytest.
# PSJOB_RUNNERS is the number of processes that run tests (three a core: most tests wait). A tier names what it could not run, and why.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HOME=${HOME:-$(echo ~)} # some containers have none set
CACHE=${PSJOB_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/psjob-dev}
RUNNERS=${PSJOB_RUNNERS:-$((3 * $(getconf _NPROCESSORS_ONLN)))}
HERE=(tests/unit tests/simulation tests/tensors tests/live tests/e2e tests/scripts tests/frameworks tests/programs tests/restarts tests/docs)
QUICK="not cluster and not nodes and not gpu and not rotating and not soak"
# Bits are compared between processes, whose kernels must add in one order; and runners share the cores.
export OMP_NUM_THREADS=1
# pytest keeps the modules that it has rewritten, so that the next run starts sooner.
unset PYTHONDONTWRITEBYTECODE

main() {
  local tier=$1; shift
  case $tier in
    unit) tests tests/unit tests/simulation -m "$QUICK" --budget unit "$@" ;;
    test) tests "${HERE[@]}" -m "$QUICK" --budget test "$@" ;;
    cluster) build integration; perhaps tests tests -m "cluster and not nodes and not rotating and not soak" "$@" ;;
    nodes) build; perhaps tests tests -m "nodes and not rotating and not soak" "$@" ;;
    gpu) tests "${HERE[@]}" -m "gpu and not soak" "$@" ;;
    rest) build; perhaps tests tests -m "(cluster or nodes or rotating) and not gpu and not soak" --slice "$(python -m hack.testing.slices --current)" --touched "$(before)" --budget rest "$@" ;;
    build) build ;;
    soak) export PSJOB_HYPOTHESIS=soak; build; tests tests -m "(rotating or soak) and not gpu" "$@" ;;
    *) echo "test.sh: $tier: name one of unit, test, cluster, nodes, gpu, rest, soak, build" >&2; return 2 ;;
  esac
}

tests() { # pytest's words
  python -m pytest --runners "$RUNNERS" "$@"
}

perhaps() { # a tier whose tests a word such as -k may all leave out
  "$@"
  local status=$?
  [ $status -eq 5 ] && status=0
  return $status
}

build() { # the parts of hack/cluster that a tier needs, or the one that is named; what cannot be built is said here and by the tests that need it
  local log=$CACHE/build.log
  mkdir -p "$CACHE"
  echo "building what is missing of the test control plane (the first time takes minutes; log: ${log/#$HOME/\~})"
  if ! { python -m hack.cluster build ${1:+--only "$1"} && { [ -n "${1:-}" ] || others; }; } >>"$log" 2>&1; then
    echo "a part could not be built; the tests that need it say so. The end of the log:"
    tail -n 15 "$log"
  fi
}

others() { # what tests need beside the parts: Prometheus' tool for rules, and images where they can be made
  python -c "from hack.promtool import promtool; promtool()" && { [ "$(id -u)" != 0 ] || python -m hack.cluster build-images; }
}

before() { # the last commit that is a day older than the newest: what came after it is the change
  git rev-list -1 --before="$(($(git log -1 --format=%ct) - 86400))" HEAD
}

main "$@"
