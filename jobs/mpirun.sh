#!/bin/bash
# mpirun for hpc3d.train on several hosts, with an exit code that can be relied on:
#
#     bash jobs/mpirun.sh --hostfile HOSTS -x PATH python -m hpc3d.train INPUT.toml ...

set -uo pipefail

# shellcheck source=kept.sh
source "$(dirname "${BASH_SOURCE[0]}")/kept.sh"

said="$(mktemp)"
trap 'rm -f "$said"' EXIT
# What ends the ranks does not end what writes their last lines.
exec {out}> >(trap '' TERM INT USR1; exec tee "$said")
tee=$!
code=0
mpirun "$@" >&"$out" || code=$?
exec {out}>&-
wait "$tee"
kept "$code" "$said"
