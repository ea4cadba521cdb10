"""Order samples, read datasets and prefetch batches."""

from steadfast.data.datasets import Dataset as Dataset
from steadfast.data.datasets import build_dataset as build_dataset
from steadfast.data.loader import Fetched as Fetched
from steadfast.data.loader import Loader as Loader
from steadfast.data.order import SampleOrder as SampleOrder
from steadfast.data.order import build_order as build_order
