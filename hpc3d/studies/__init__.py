"""Published results, derived again."""
