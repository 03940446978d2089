"""Options of the backend string, such as trtllm_like[parts=64]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Options"]


class Options(BaseModel):
    """Overrides of what is otherwise chosen by device and shape.

    parts: into how many equal stretches a step's decode work is split; by default one for each place a
    program can run at. form: "rows" keeps query rows as rows of the matrix products, "columns" as columns,
    for few heads.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parts: Annotated[int, Field(ge=1, le=4096)] | None = None
    form: Literal["auto", "rows", "columns"] = "auto"
