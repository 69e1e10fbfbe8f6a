"""The state of a run on disk: any layout reads any layout."""
