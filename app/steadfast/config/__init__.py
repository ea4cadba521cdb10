"""Define, load and compare the configuration of a run."""

from steadfast.config.axes import Layout as Layout
from steadfast.config.base import Every as Every
from steadfast.config.base import Target as Target
from steadfast.config.data_sections import *  # noqa: F403 - every section, by its own name
from steadfast.config.document import decoded as decoded
from steadfast.config.identity import Change as Change
from steadfast.config.identity import diff as diff
from steadfast.config.load import dump_config as dump_config
from steadfast.config.load import load_config as load_config
from steadfast.config.load import parse_config as parse_config
from steadfast.config.load import with_values as with_values
from steadfast.config.parallel_sections import *  # noqa: F403
from steadfast.config.schema import *  # noqa: F403
