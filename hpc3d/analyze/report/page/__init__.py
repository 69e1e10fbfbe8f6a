"""What a report is written as: its folder, and the page with its style, scripts and data."""
