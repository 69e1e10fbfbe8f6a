"""Picture of a parallel layout, as text and as SVG."""
