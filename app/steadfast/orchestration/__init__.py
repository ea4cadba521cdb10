"""Orchestration of a run on Ray: coordinator, supervisor, worker runtime and slots.

How a run survives the death of worker B, with worker A as a survivor:

    B                dies, and B's machine closes the connection of B's heartbeats
    HeartbeatServer  detects the closed connection, or B's silence for `recovery.silence_s`, and calls the coordinator
    Coordinator      kills B's actor, and sends Commands(aborted=attempt) to all other workers
    A's RayRuntime   aborts A's process groups, so the collective in which A waits for B raises, and train() unwinds
    A's RayRuntime   reports PeerLost, which ends the attempt, and asks for an assignment to the next world
    Coordinator      forms a world of the survivors once all of them wait: next attempt, WorldAssignment
    A                forms process groups and restores: from a survivor, copies in memory or the newest checkpoint
    B's slot         detects the actor's death, and requests another actor; C starts there once there is room
    Coordinator      when C has joined, sends Commands(leave=attempt): the world ends at a step that its ranks agree on
    A and C          form the next world in the same way, and C receives the state from A

When the coordinator dies, Ray restarts the coordinator, and the workers rejoin it by `Coordinator.rejoin`. The world
trains on meanwhile.
"""
