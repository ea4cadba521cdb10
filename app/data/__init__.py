"""Order samples, read datasets and prefetch batches."""

from app.data.datasets import Dataset as Dataset
from app.data.datasets import build_dataset as build_dataset
from app.data.loader import Fetched as Fetched
from app.data.loader import Loader as Loader
from app.data.order import SampleOrder as SampleOrder
from app.data.order import build_order as build_order
