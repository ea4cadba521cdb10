"""Steadfast: elastic training on Ray. Begin with train.py; docs/architecture.md tells how it is built."""
