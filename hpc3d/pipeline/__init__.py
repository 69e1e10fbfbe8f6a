"""Pipelines: schedules as streams of instructions, passes that lower them, the engine."""
