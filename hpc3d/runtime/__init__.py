"""Start and end of an MPI job: environment, launcher, signals and stop requests."""
