"""What the sections of a run file are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from headrace import address


def _check_address(value: str) -> str:
    if value and "://" not in value and not value.startswith("unix:"):
        host, port = address.split(value)
        if not host or not port:
            raise ValueError(f"{value!r} names no host or no port; give both")
    return value


Address = Annotated[str, AfterValidator(_check_address)]
Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the run file: frozen, and a stranger to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)
