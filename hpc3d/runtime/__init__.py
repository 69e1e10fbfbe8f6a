"""How a job starts and ends: environment, exit codes, launcher, watchdog."""
