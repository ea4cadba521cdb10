"""Report of a run: one self-contained HTML page, made from the files of the run."""
