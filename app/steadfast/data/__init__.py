"""Order samples, read datasets and prefetch batches.

How training samples reach the forward of a rank:

    Plan.stream            yields the rank's microbatches, pads included: ranges of positions in one endless stream
        |  Microbatch(step, index, start, stop, weight)
        v
    SampleOrder.train      maps positions to sample ids, by a pure function of the seed (`data.order` names another)
        |  ids, and for each sample a key: a hash of seed, id and position
        v
    Dataset[id]            reads and augments a sample, while its key seeds the generators of torch, numpy and Python
        |  samples
        v
    collate or stack       makes one batch of the samples: `data.collate`, else tensors stacked in the same containers
        |  Fetched(microbatch, batch, num_samples, digest): the digest is the sum of the keys, for the ledger
        v
    StreamCopies           copies the batch to a GPU from pinned memory, on a stream of its own; a CPU needs no copy
        |  the same Fetched, with tensors on the device
        v
    Stepper.step           runs the microbatch; after memory has run out, `split` first cuts the microbatch into parts

With `data.num_workers` the steps from SampleOrder to the batch run in loader processes, ahead of training; otherwise
the training process runs these steps when it needs a microbatch. Validation takes the same way in the training process,
by `SampleOrder.validation` or over data of its own, and with `data.validation.collate`.
"""

from steadfast.data.datasets import Dataset as Dataset
from steadfast.data.datasets import build_dataset as build_dataset
from steadfast.data.loader import Fetched as Fetched
from steadfast.data.loader import Loader as Loader
from steadfast.data.order import Extent as Extent
from steadfast.data.order import SampleOrder as SampleOrder
from steadfast.data.order import build_order as build_order
