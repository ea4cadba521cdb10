"""Stages of the tests: what each one has, how long it takes, and how many CPU seconds it may use.

stages.toml  the stages, their figures and budgets
__main__     runs stages, one after another
plugin       pytest's side: progress, the CPU seconds of each test, the budget
meter        CPU seconds of a process and of all processes that it starts
record       figures of earlier runs in this checkout
rows         tests that `make test` leaves out
costs        writes costs.md
"""
