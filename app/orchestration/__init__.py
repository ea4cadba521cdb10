"""Everything that touches Ray while a run is going on.

How a run outlives the death of a worker B (`recovery.mode=slots`, the default):

    B                dies, and its machine closes the connection on which it sent heartbeats
    HeartbeatServer  reads the end of it, or B's machine answers no more for `recovery.silence_s`; tells the coordinator
    Coordinator      kills what may be left of B, and sends Commands(aborted=attempt) to all others
    A's RayRuntime   aborts A's process groups, so the collective in which A waits for B raises, and train() unwinds
    A's RayRuntime   reports PeerLost, which ends the attempt, and asks for an assignment to the next world
    Coordinator      forms a world of the survivors once all of them wait: next attempt, WorldAssignment
    A                forms process groups and restores: from a survivor, copies in memory or the newest checkpoint
    B's slot         sees the actor die, and asks Ray for another one; C starts in it once there is room
    Coordinator      when C has joined, sends Commands(leave=attempt): the world ends at a step that its ranks agree on
    A and C          form the next world in the same way, and C receives the state from A

And the coordinator: Ray starts it again, the workers come back to it by themselves, and the world trains on meanwhile
(`Coordinator.rejoin`).
"""
