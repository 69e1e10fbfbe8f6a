#!/bin/bash
# Run hpc3d.train on several hosts with mpirun, and return a reliable exit status:
#
#     bash jobs/mpirun.sh --hostfile HOSTS -x PATH python -m hpc3d.train INPUT.toml ...

set -uo pipefail

# shellcheck source=kept.sh
source "$(dirname "${BASH_SOURCE[0]}")/kept.sh"

said="$(mktemp)"
trap 'rm -f "$said"' EXIT
# The signal that ends the ranks must not terminate tee, which writes their last lines.
exec {out}> >(trap '' TERM INT USR1; exec tee "$said")
tee=$!
code=0
mpirun "$@" >&"$out" || code=$?
exec {out}>&-
wait "$tee"
kept "$code" "$said"
