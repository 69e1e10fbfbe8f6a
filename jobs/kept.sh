# Exit status of a job. A launcher may return 0 although the job did not finish: mpirun does if it
# loses a host. The last lines of hpc3d.train show whether the run finished. Other scripts source this.
# shellcheck shell=bash

# kept CODE OUTPUT: print the exit status of a launcher that returned CODE and wrote the file OUTPUT:
# 1 instead of 0 if the run did not finish.
kept() {
    [ "$1" = 0 ] || return "$1"
    local _
    for _ in {1..20}; do  # another process writes the output, possibly with a delay
        if grep -q "run kept in " "$2"; then return 0; fi
        sleep 0.1
    done
    echo "the launcher exited with 0, but the run did not finish: a host or its link was lost." \
        "Continue with --resume" >&2
    return 1
}
