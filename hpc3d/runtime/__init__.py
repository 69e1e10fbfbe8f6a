"""Start and terminate MPI jobs: environment, launcher, signals and stop requests."""
