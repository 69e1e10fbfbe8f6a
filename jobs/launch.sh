# What every job does first, and how it starts ranks; the scripts of this folder source it.
#
# Lines marked SITE depend on the cluster; jobs/README.md tells how to choose them.
# shellcheck shell=bash

# Slurm runs a copy of the script that lies elsewhere.
cd "$SLURM_SUBMIT_DIR" || exit

# SITE: the modules that `make setup` or `pip install` saw, so that mpi4py finds the same MPI again.
# module load openmpi
# shellcheck source=/dev/null
[ ! -f .venv/bin/activate ] || source .venv/bin/activate  # else hpc3d's python is on PATH

# SITE: how this cluster starts MPI programs, e.g. LAUNCH=mpirun sbatch jobs/train.sbatch
read -ra launch <<< "${LAUNCH:-srun --mpi=pmix}"

# NumPy's threads. Since Slurm 22.05 srun does not take --cpus-per-task from the job.
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"

# After `sbatch --export=NONE` srun would give its ranks nothing of what is set here.
export SLURM_EXPORT_ENV=ALL

# An mpirun of the site learns in 15 s that a host or the link to it is lost, and not in minutes.
export PRTE_MCA_oob_tcp_keepalive_time=6 PRTE_MCA_oob_tcp_keepalive_intvl=3
export PRTE_MCA_oob_tcp_keepalive_probes=3

# shellcheck source=kept.sh
source jobs/kept.sh

# The folder of the runs of this job, or task of an array; its log lies beside it.
# shellcheck disable=SC2034 # of the scripts
out="results/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}: ${launch[*]}"

# train WORDS ...: hpc3d.train on the ranks of the job.
#
# The signal of `#SBATCH --signal` comes to this shell, which notes it in `told` and tells the
# launcher, and so the ranks. A signal also ends `wait`, hence the loop; the last `wait` has the
# exit code of a launcher that is gone.
told=""
trap 'told=1; kill -USR1 "$(jobs -p)" 2> /dev/null || true' USR1
train() {
    local said out tee ranks code=0
    said="$(mktemp)"
    # What ends the ranks does not end what writes their last lines.
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

# saved FOLDER: the last run in FOLDER that has a checkpoint, if any; FOLDER may be that run.
saved() {
    local checkpoint run=""
    for checkpoint in "$1"/{,*/}checkpoints/step-????????; do
        [ ! -d "$checkpoint" ] || run="${checkpoint%/checkpoints/*}"
    done
    echo "$run"
}

# stopped CODE FOLDER: what to do when `train` ended with CODE, with its run in FOLDER.
#
# 75 is a run that stopped on request, 138 one whose ranks were told before they could listen. Only
# the signal asks for another turn in the queue: a run that was stopped by a file STOP, or whose job
# was cancelled, is meant to stop.
stopped() {
    if [ -n "$told" ] && { [ "$1" = 138 ] || { [ "$1" = 75 ] && [ -n "$(saved "$2")" ]; }; }; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$1"
}
