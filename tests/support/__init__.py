"""Helpers that more than one test file or folder uses, one subject to a module."""
