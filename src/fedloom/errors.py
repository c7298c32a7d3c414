"""Errors that a user can fix: the names of `fedloom.core.errors`."""

from fedloom.core.errors import MANY as MANY
from fedloom.core.errors import DataError as DataError
from fedloom.core.errors import InUseError as InUseError
from fedloom.core.errors import RecipeError as RecipeError
from fedloom.core.errors import RunWarning as RunWarning
from fedloom.core.errors import StateError as StateError
from fedloom.core.errors import UserError as UserError
from fedloom.core.errors import at as at
from fedloom.core.errors import choices as choices
from fedloom.core.errors import listed as listed
from fedloom.core.errors import naming as naming
from fedloom.core.errors import nearest as nearest
from fedloom.core.errors import of_system as of_system
from fedloom.core.errors import parsing as parsing
from fedloom.core.errors import unknown as unknown
from fedloom.core.errors import warn as warn
from fedloom.core.errors import writing as writing
