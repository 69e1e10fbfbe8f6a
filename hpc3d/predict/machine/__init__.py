"""A machine as a file of facts: rates, links, collectives."""
