"""Open datasets of Hugging Face's package `datasets`.

A sample is a mapping of columns, with numbers as tensors.
"""

from pathlib import Path
from typing import Any

from steadfast.config import HuggingFaceSource
from steadfast.data.extras import import_extra
from steadfast.errors import DataError
from steadfast.run.directory import place_of_data


def open_huggingface(config: HuggingFaceSource, key: str) -> Any:
    """Open the dataset of the section at `key`.

    Raises DataError if the dataset cannot be read, and ConfigError without the package.
    """
    datasets = import_extra("datasets", "huggingface", f"{key}.kind")
    try:
        found = _load(datasets, config)
        return found.with_format("torch", columns=list(config.columns) or None)
    except (OSError, ValueError, IndexError) as error:  # with_format raises IndexError for an empty dataset
        raise DataError(f"{config.path!r} cannot be read: {error}") from error


def _load(datasets: Any, config: HuggingFaceSource) -> Any:
    path = place_of_data(config.path)  # a name on the hub stays as it is
    folder = Path(path)
    split = config.split or "train"
    if (folder / "dataset_dict.json").exists():
        splits = datasets.load_from_disk(path)
        if split not in splits:
            raise DataError(f"{config.path!r} has no split {split}; there are: {', '.join(splits)}")
        return splits[split]
    if (folder / "state.json").exists():
        found = datasets.load_from_disk(path)
        # Otherwise a user might validate on the training split without noticing.
        if config.split and config.split != str(found.split):
            raise DataError(f"{config.path!r} holds the split {found.split} alone, not {config.split}")
        return found
    return datasets.load_dataset(path, config.name, split=split)
