# Set up the environment of a job, and define functions that start ranks. The other scripts in this
# folder source this file.
#
# Lines marked SITE depend on the cluster; jobs/README.md explains how to choose them.
# shellcheck shell=bash

# Slurm runs a copy of the script in another folder.
cd "$SLURM_SUBMIT_DIR" || exit

# SITE: load the same modules as during `make setup` or `pip install`, because mpi4py needs the same
# MPI library.
# module load openmpi
# shellcheck source=/dev/null
[ ! -f .venv/bin/activate ] || source .venv/bin/activate  # otherwise, use python on PATH

# SITE: launcher of MPI programs, e.g. LAUNCH=mpirun sbatch jobs/train.sbatch. Each rank has cores of
# its own, and adjacent ranks have adjacent cores and nodes.
read -ra launch <<< "${LAUNCH:-srun --mpi=pmix --cpu-bind=cores --distribution=block:block}"

# Number of NumPy threads. Since Slurm 22.05, srun does not inherit --cpus-per-task from the job.
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"

# After `sbatch --export=NONE`, srun would not export the variables set here to the ranks.
export SLURM_EXPORT_ENV=ALL

# With these settings, Open MPI's mpirun detects a lost host or link within 15 s instead of minutes.
export PRTE_MCA_oob_tcp_keepalive_time=6 PRTE_MCA_oob_tcp_keepalive_intvl=3
export PRTE_MCA_oob_tcp_keepalive_probes=3

# shellcheck source=kept.sh
source jobs/kept.sh

# Folder for the runs of this job or array task. The log of the job is next to this folder.
# shellcheck disable=SC2034 # used by the scripts that source this file
out="results/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}: ${launch[*]}"

# train ARGUMENTS ...: run hpc3d.train on the ranks of the job.
#
# This shell receives the signal of `#SBATCH --signal`, records it in `signaled`, and forwards it to
# the launcher, which forwards it to the ranks. The loop is needed because a signal also interrupts
# `wait`. The last `wait` returns the exit status of the launcher.
signaled=""
trap 'signaled=1; kill -USR1 "$(jobs -p)" 2> /dev/null || true' USR1
train() {
    local said out tee ranks code=0
    said="$(mktemp)"
    # The signal that ends the ranks must not terminate tee, which writes their last lines.
    exec {out}> >(trap '' TERM INT USR1; exec tee "$said")
    tee=$!
    "${launch[@]}" python -m hpc3d.train "$@" >&"$out" &
    ranks=$!
    exec {out}>&-
    while kill -0 "$ranks" 2> /dev/null; do wait "$ranks" || true; done
    wait "$ranks" || code=$?
    wait "$tee" || true
    kept "$code" "$said" || code=$?
    rm -f "$said"
    return "$code"
}

# saved FOLDER: print the newest run in FOLDER that has a checkpoint, or nothing if no run has one.
# FOLDER may itself be a run folder.
saved() {
    local checkpoint run=""
    for checkpoint in "$1"/{,*/}checkpoints/step-????????; do
        [ ! -d "$checkpoint" ] || run="${checkpoint%/checkpoints/*}"
    done
    echo "$run"
}

# stopped CODE FOLDER: after `train` has returned CODE for a run in FOLDER, requeue the job if a
# signal stopped the run, and exit with CODE.
#
# Code 75: the run stopped on request. Code 138: the signal arrived before the ranks had installed a
# handler. The job is not requeued if a file STOP ended the run or if the job was canceled.
stopped() {
    if [ -n "$signaled" ] && { [ "$1" = 138 ] || { [ "$1" = 75 ] && [ -n "$(saved "$2")" ]; }; }; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$1"
}
