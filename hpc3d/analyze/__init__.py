"""Analysis of a run from its trace: metrics, reports and exports."""
