"""Workers of one attempt: process groups, control channel and progress.

How a worker becomes a rank, and what the ranks of an attempt exchange:

    Runtime.next_world     gets a place in the next world, from the coordinator or torchrun: rank, size, attempt, store
        |
        v
    form_world             the ranks meet in the store; gloo connects the control group, and gloo (on CPUs) or NCCL
        |                  (on CUDA) connects the communicator
        v
    World                  rank, size, attempt, groups, amendments to the plan, progress; the leader is rank 0

    on the device          gradients, counts, buffers --> collectives of the Communicator --> Groups.gate --> update
                           The gate waits for the results, and raises PeerLost if the world was aborted.
    on the host            numbers and requests of a step --> ControlChannel: one sum over ranks, posted when the step
                           ends and read when the next one ends --> all ranks act on the same requests and losses
    beside training        phases of the training thread --> Progress.report --> heartbeat to the coordinator (on Ray)

    Groups.abort           ends running collectives, here and at the peers; called by the thread of the heartbeats when
                           a peer is lost, or by a rank that fails
    Groups.destroy         ends the groups, so that the process can take its place in the next world
"""
