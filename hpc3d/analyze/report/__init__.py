"""Tables, figures and pages from those metrics."""
