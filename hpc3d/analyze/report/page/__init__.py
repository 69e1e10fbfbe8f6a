"""The page of a report beside Bokeh's figures: its template, style, scripts and packed data."""
