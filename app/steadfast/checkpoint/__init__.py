"""States that outlive an attempt: content, checkpoints, snapshots and restore.

Where the state of a whole step goes, and where the next attempt finds a state:

    state of a rank: model, optimizer, precision, hooks
      |  Snapshots.take, so often that copies take 1 % of the time; by one rank of each node, or, if the state is
      |  sharded, by each rank of the first replica, and as often as `checkpoint.lose_at_most` needs it (Promise)
      +----> NodeMemory         buffers of a process outside of the workers; shards also go to another node
      |
      |  Checkpoints.save, when `checkpoint.every` is due; by the leader, or by each rank of the first replica
      +----> StagingBuffer      host memory; training waits for this copy alone
               |  thread of Writer: one safetensors file, hashed during the write
               +----> storage   the leader collects names and sha256 of all files, and commits manifest.json
                        |       (Catalog.commit), which makes the folder a checkpoint
                        +-----> Catalog.retire reads the checkpoint back, and then deletes those not to be kept

    restore, at the start of each attempt, fills every rank from the first of these that exists:
      1. living ranks           the newest step of which they hold every part, sent to ranks that hold an older one
      2. a snapshot             the newest whole and undamaged one, unless a checkpoint is newer
      3. a checkpoint           the newest intact one; a damaged one is quarantined, and the next older one is tried
      4. step 0                 the initial model, or the weights of `run.init_from`

After an exception in user code the workers write the parts of the last whole step as `Parts`, without collectives.
"""
