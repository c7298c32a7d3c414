"""The base class of recipe sections, and how strictly values are read. Free of torch."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A recipe section: unknown keys are errors, values do not change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


M = TypeVar("M", bound=BaseModel)


def strict(model: type[M], value: Any) -> M:
    """Validate as JSON: '10' or true is no integer and 1 is a number, but a list may stand for a tuple."""
    return model.model_validate_json(json.dumps(value, default=repr), strict=True)
