"""What the page of a report has beside figures: template, style, scripts, data of its steps."""
