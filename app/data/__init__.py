"""Order (which sample stands where), datasets (what a sample is) and the loader (fetching ahead)."""

from app.data.datasets import Dataset as Dataset
from app.data.datasets import build_dataset as build_dataset
from app.data.loader import Fetched as Fetched
from app.data.loader import Loader as Loader
from app.data.order import SampleOrder as SampleOrder
