# Layouts of the scaling jobs, one per array task. Both scaling scripts source this file.
# shellcheck shell=bash

# shellcheck source=launch.sh
source "$SLURM_SUBMIT_DIR/jobs/launch.sh"

# All tasks share a folder, so that one table contains all runs.
out="results/$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID"

# ranks  scheme  x y z
layouts=(
    "1   3d         1 1 1"
    "8   1d         8 1 1"
    "8   2d-summa   4 2 1"
    "8   2.5d       2 2 2"
    "8   3d         2 2 2"
    "64  1d        64 1 1"
    "64  2d-summa   8 8 1"
    "64  2.5d       4 4 4"
    "64  3d         4 4 4"
    "64  3d        16 4 1"
)
read -r ranks scheme x y z <<< "${layouts[SLURM_ARRAY_TASK_ID]}"

# measure HIDDEN BATCH ARGUMENTS ...: train with the layout of this task, on as many of the job's
# ranks as the layout needs. If ARGUMENTS contain no input file, train the model of gpt-3d-64.toml.
#
# Run names begin with the task number, so the smallest layout comes first; the report compares the
# other runs with the first one.
measure() {
    local hidden="$1" batch="$2" input=inputs/gpt-3d-64.toml
    shift 2
    case "${1-}" in *.toml) input="$1"; shift ;; esac
    launch+=(-n "$ranks")
    train "$input" \
        --name "$(printf %02d "$SLURM_ARRAY_TASK_ID")-$ranks-$scheme" --run.out "$out" \
        --parallel.scheme "$scheme" --mesh.x "$x" --mesh.y "$y" --mesh.z "$z" \
        --model.hidden "$hidden" --train.batch "$batch" "$@"
    echo "when all tasks are done: sbatch jobs/report.sbatch $out"
    echo "or, for the scaling table only: python -m hpc3d.bench scaling --runs $out"
}
