"""Define, load and compare the configuration of a run."""

from app.config.base import Every as Every
from app.config.base import Target as Target
from app.config.document import decoded as decoded
from app.config.identity import Change as Change
from app.config.identity import diff as diff
from app.config.load import dump_config as dump_config
from app.config.load import load_config as load_config
from app.config.load import parse_config as parse_config
from app.config.schema import *  # noqa: F403 - every section, by its own name
