"""Machine model: compute rates, links and collective costs, read from a file."""
