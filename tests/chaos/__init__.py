"""The failure matrix: the same faults done to this application, to a stock Ray Train loop and to a torchrun loop.

`matrix` lists the faults and the claims, `contenders` starts and harms each contender, `drills` does the faults one
after another, `report` measures and judges, and `yardstick` measures how busy the machine is meanwhile. `loop`,
`ray_loop`, `torchrun_loop` and `torchft_loop` are the baselines. Of the storms, `schedules` draws the faults, `storm`
takes one contender through one storm, `storm_runs` all of them, `storm_page` shows the figures, and `night` is a long
storm. The cluster of several nodes on one machine is `tests/support/bed.py`.
"""
