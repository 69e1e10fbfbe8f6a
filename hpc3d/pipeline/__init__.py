"""Pipeline parallelism: schedules as instruction streams, passes that lower them, the engine."""
