"""What the page of a report has beside Bokeh's figures: its template, style and scripts, and the data of its steps."""
