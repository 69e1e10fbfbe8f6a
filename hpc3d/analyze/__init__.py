"""What a run costs: its trace as tables and figures."""
