"""Code shared by all commands: argument parser, output, progress display, exit codes, file I/O."""
