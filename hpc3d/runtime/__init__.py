"""How a job starts and ends: environment, launcher, watchdog."""
