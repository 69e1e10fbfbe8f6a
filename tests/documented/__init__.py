"""The shell commands of README and the pages: found, given to the parsers, and run."""
