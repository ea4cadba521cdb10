"""The report of a run: one page of HTML that opens from disk, made from what the run has written down."""
