"""Helpers that several test files or folders use, one subject to a module.

Runs in real processes, without Ray:
    small            the configuration of a small run in which everything could depend on the worker
    gang, drill      processes that share a store; the whole loop in them, world after world
    frozen           imported last by servers that fork
    stepping         some optimizer steps without the loop
    reference        one process that does the whole global batch: what a run must equal
    claims           what every drilled run must satisfy
    mutations        the program, broken on purpose, to show that each claim can fail
    patches          changes to the processes of a drill that break no claim
    deaths, killing  workers that are killed at a collective; processes that are killed while they save
    like_nccl        a communicator that behaves like NCCL's, on CPUs
    models, optimizers, orders    code of a user, for `target`
    loading          loaders over small datasets

Commands and clusters:
    command          the literal command of a user, and what it leaves
    verbs            a verb of the command line in this process
    warm             commands as forks of a process that has imported what they need
    head_worker      the program that the raylet of the shared head starts for each worker
    checks           assertions on a run directory
    programs         programs of a user's own
    curves           the figures of trackers after a kill
    leftovers        processes and shared memory that a command must not leave behind
    bed              a Ray cluster of several nodes on this machine
    processes, pace  descendants of a process; forwards that last as long as on an accelerator
    clock            a clock that a test sets
    metadata         a cloud's metadata service

Files and storage:
    stores, s3       the contract of every store; a real S3 server, and a proxy that fails as told
    events, history  lines of `events.jsonl`; lines of a ledger
    run_directories  run directories as a run leaves them
    json_tables      the tables of docs/json.md
    wheels           wheels that need no download
    allocator        the memory that tensors take
    leaks            what a test must not leave behind
"""
