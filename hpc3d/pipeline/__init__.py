"""Pipeline parallelism: instruction streams of schedules, lowering passes, and the engine."""
