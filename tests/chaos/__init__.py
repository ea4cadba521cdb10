"""The failure matrix: the same faults done to this application, to a stock Ray Train loop and to a torchrun loop.

`matrix` says which faults and what is claimed, `contenders` how each is started and harmed, `bed` is a Ray cluster of
several nodes on one machine, `drills` does the faults one after another, `report` measures and judges, and `yardstick`
says how busy the machine is meanwhile. `loop`,
`ray_loop` and `torchrun_loop` are the baselines.
"""
