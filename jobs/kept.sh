# A launcher may end with 0 although its job was cut short, as mpirun does where it lost a host.
# What hpc3d.train says at its end tells the two apart; scripts of this folder source this file.
# shellcheck shell=bash

# kept CODE SAID: the exit code of a launcher that ended with CODE, whose output is in the file
# SAID: 1 in place of 0 if the run did not come to its end.
kept() {
    [ "$1" = 0 ] || return "$1"
    local _
    for _ in {1..20}; do  # what is written by another process may come late
        if grep -q "run kept in " "$2"; then return 0; fi
        sleep 0.1
    done
    echo "the launcher ended with 0, but the run did not come to its end: a host or its link was" \
        "lost; go on with --resume" >&2
    return 1
}
