"""Shell commands in README and the pages: extracted, parsed and run."""
