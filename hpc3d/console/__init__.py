"""Modules shared by all commands: parser, sanitized output, progress, exit codes, small files."""
