"""Sections of the data: sources of samples, their order, and the data for validation."""

import fractions
import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from steadfast.config.base import Fraction, Order, Section, Target, Text

_LARGEST_PERIOD = 2**16  # places after which the sources of a mixture repeat their sequence


class LoaderConfig(Section):
    """Processes that read samples ahead of the training step.

    No key changes the samples themselves, so a resume may change any of the keys.
    """

    num_workers: Literal["auto"] | NonNegativeInt = "auto"
    """loader processes of each worker; 0 loads samples in the worker itself; each prepares two microbatches
    ahead; auto is 0 on a CPU and 2 on a GPU, or 1 if
    the machine has fewer than three cores per GPU. Raise it if `data wait` is high"""


class TextSource(Section):
    kind: Literal["text"] = "text"
    source: Text = "python-docs"
    """text to read as bytes: python-docs, which comes with Python, or a glob of text files"""
    context_length: PositiveInt = 128
    """number of tokens in one sample; at most model.context_length"""


class TokensSource(Section):
    kind: Literal["tokens"] = "tokens"
    path: Text
    """a flat binary file of tokens"""
    dtype: Literal["uint8", "uint16", "uint32"] = "uint16"
    """integer type in which the file stores a token"""
    context_length: PositiveInt = 128
    """number of tokens in one sample; at most model.context_length"""
    end_token: NonNegativeInt | None = None
    """token that ends a document. Then attention and positions begin anew with each document, and the first token of a
    document is no target: the model gets input_ids and position_ids, as models of Hugging Face do. null reads the file
    as one text"""


class ImageFolderSource(Section):
    kind: Literal["image_folder"] = "image_folder"
    path: Text
    """a folder with one folder of images for each class, as torchvision's ImageFolder reads it"""
    image_size: PositiveInt = 224
    """height and width of the model's input in pixels"""
    augment: bool = True
    """crop and flip training images at random; validation always uses the middle of an image"""


class HuggingFaceSource(Section):
    kind: Literal["huggingface"] = "huggingface"
    path: Text
    """a folder written by a dataset's save_to_disk, or a folder or name for datasets.load_dataset"""
    name: Text | None = None
    """configuration (subset) of the dataset, as for datasets.load_dataset; null if the dataset has only one"""
    split: Text | None = None
    """split of the dataset, such as train, validation or train[:80%]; null is train if the dataset has splits"""
    columns: tuple[Text, ...] = ()
    """columns of a sample; all columns if the list is empty"""


class ShardsSource(Section):
    kind: Literal["parquet", "jsonl", "webdataset"]
    path: Text
    """a folder, or the URI of a folder in a bucket, with files *.parquet, *.jsonl or *.tar as WebDataset writes them"""
    columns: tuple[Text, ...] = ()
    """names of a sample's values: columns of Parquet, keys of a JSON line, suffixes of the files of a tar such as jpg
    and cls; all of them if the list is empty"""


class WeightedConfig(Section):
    weight: PositiveFloat = 1.0
    """share of the samples that come from this source, relative to the weights of the other sources"""
    order: Order = "shuffled"
    """order of the source's samples, as in data.order; a function may draw samples with replacement"""


class WeightedText(WeightedConfig, TextSource):
    pass


class WeightedTokens(WeightedConfig, TokensSource):
    pass


class WeightedImages(WeightedConfig, ImageFolderSource):
    pass


class WeightedHuggingFace(WeightedConfig, HuggingFaceSource):
    pass


class WeightedShards(WeightedConfig, ShardsSource):
    order: Order = "blocks"
    """order of the source's samples, as for other sources; shuffled is slow for Parquet, read by row groups"""


class WeightedTarget(WeightedConfig, Target):
    pass


WeightedSource = Annotated[
    WeightedText | WeightedTokens | WeightedImages | WeightedHuggingFace | WeightedShards | WeightedTarget,
    Field(discriminator="kind"),
]


def _integers(numbers: Sequence[float]) -> tuple[int, ...]:
    """Return integers without a common divisor in the same proportions as the numbers' decimal digits."""
    exact = [fractions.Fraction(str(number)) for number in numbers]
    multiple = math.lcm(*(number.denominator for number in exact))
    integers = [int(number * multiple) for number in exact]
    divisor = math.gcd(*integers)
    return tuple(integer // divisor for integer in integers)


class MixtureSource(Section):
    kind: Literal["mixture"] = "mixture"
    sources: Annotated[tuple[WeightedSource, ...], Field(min_length=1)]
    """sources of samples, each with a weight and the keys of its kind. Of any number of samples in training order each
    source has its share, to within one sample; a source repeats its samples when it has used all of them. An epoch has
    as many samples as all sources together"""

    @property
    def integer_weights(self) -> tuple[int, ...]:
        """Return the weights in the same proportions, as integers."""
        return _integers([source.weight for source in self.sources])

    @field_validator("sources")
    @classmethod
    def weights_are_round(cls, sources: tuple[WeightedConfig, ...]) -> tuple[WeightedConfig, ...]:
        total = sum(_integers([source.weight for source in sources]))
        if total > _LARGEST_PERIOD:
            raise ValueError(
                f"weights add up to {total} as integers without a common divisor, more than {_LARGEST_PERIOD}; round "
                "them to fewer digits"
            )
        return sources


Source = TextSource | TokensSource | ImageFolderSource | HuggingFaceSource | ShardsSource | MixtureSource | Target


class CollateConfig(Section):
    collate: Target | None = None
    """a function that makes a batch of a list of samples; with args, or as a class, it is called first and returns that
    function; null stacks the samples"""


class HeldOut(CollateConfig):
    """Samples held out by data.validation_fraction."""

    kind: Literal["held_out"] = "held_out"


class ValidationImages(CollateConfig, ImageFolderSource):
    pass


class ValidationHuggingFace(CollateConfig, HuggingFaceSource):
    pass


class ValidationShards(CollateConfig, ShardsSource):
    pass


class ValidationTarget(CollateConfig, Target):
    pass


AnyValidation = Annotated[
    HeldOut
    | TextSource
    | TokensSource
    | ValidationImages
    | ValidationHuggingFace
    | ValidationShards
    | ValidationTarget,
    Field(discriminator="kind"),
]


class DataConfig(LoaderConfig):
    order: Order = "shuffled"
    """order of the samples in an epoch: shuffled, differently in each epoch; blocks, which shuffles the blocks of
    neighbouring samples and the samples of 16 blocks in a row, so that disks read in sequence; sequential, as in the
    dataset; or a function of the user's own, `steadfast.data.order.Order` (a class, or a function with args, is called
    first and returns that function). Unless shuffled, the last samples of the dataset are held out"""
    validation_fraction: Fraction = 0.1
    """share of the samples (of each source) held out of training for validation, from 0 to below 1; if the order is
    shuffled, run.seed selects the samples"""
    validation: AnyValidation | None = None
    """data for validation, instead of the held-out share of the training data. If data.validation and data have
    the same kind, context_length, image_size and end_token default to those of data. data.collate applies to training
    only; {collate: ...} without a kind sets the collate function of the held-out share"""

    @property
    def held_out_fraction(self) -> float:
        """Return the share of the training data that is held out."""
        if self.has_own_validation:
            return 0.0
        return self.validation_fraction

    @property
    def has_documents(self) -> bool:
        """Return whether samples hold several documents, which attention keeps apart."""
        sections = (self, *getattr(self, "sources", ()))
        return any(getattr(section, "end_token", None) is not None for section in sections)

    @property
    def has_own_validation(self) -> bool:
        """Return whether validation reads data of its own."""
        return self.validation is not None and not isinstance(self.validation, HeldOut)

    @field_validator("validation")
    @classmethod
    def something_is_held_out(cls, validation: Section | None, info: ValidationInfo) -> Section | None:
        if isinstance(validation, HeldOut) and info.data.get("validation_fraction") == 0:
            context = {"key": "data.validation.collate"}
            message = "has no samples: data.validation_fraction is 0, and data.validation names no data"
            raise PydanticCustomError("rule", message, context)
        return validation


class TextData(DataConfig, TextSource):
    pass


class TokensData(DataConfig, TokensSource):
    pass


class SamplesConfig(DataConfig, CollateConfig):
    """Data whose samples are read one by one and then collated."""


class ImageFolderData(SamplesConfig, ImageFolderSource):
    pass


class HuggingFaceData(SamplesConfig, HuggingFaceSource):
    pass


class ShardsData(SamplesConfig, ShardsSource):
    order: Order = "blocks"
    """order of the samples in an epoch, as for other data; shuffled is slow for Parquet, read by row groups"""


class MixtureData(SamplesConfig, MixtureSource):
    """Samples of several sources, by weights."""

    order: Literal["shuffled"] = "shuffled"
    """always shuffled: the sources take turns by their weights. `order` of a source sets the order of its samples"""


class TargetData(SamplesConfig, Target):
    """Map-style dataset of the user's own."""


AnyData = TextData | TokensData | ImageFolderData | HuggingFaceData | ShardsData | MixtureData | TargetData
