"""Report of a run: one self-contained HTML page."""
