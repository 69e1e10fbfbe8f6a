# Determine the exit status of a job. A launcher may return 0 although the run did not finish, as
# mpirun does if it loses a host. The last lines that hpc3d.train prints show whether the run
# finished. Other scripts source this file.
# shellcheck shell=bash

# kept CODE OUTPUT: return the exit status CODE of a launcher whose output is in the file OUTPUT, or
# 1 if CODE is 0 but the run did not finish.
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
