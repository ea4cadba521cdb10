"""Programs of the shapes that people train, each as a plain loop and for Steadfast.

`tests/dist/test_differential.py` compares the two; `docs/programs.md` has a row for each.
"""
