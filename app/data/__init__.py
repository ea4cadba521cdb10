"""Order (which sample stands where), datasets (what a sample is) and the loader (fetching ahead)."""

from app.data.datasets import Dataset, build_dataset
from app.data.loader import Fetched, Loader
from app.data.order import SampleOrder

__all__ = ["Dataset", "Fetched", "Loader", "SampleOrder", "build_dataset"]
