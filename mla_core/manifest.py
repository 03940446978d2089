"""What a plugin says about itself without loading its kernels.

An entry point in the group `mla_core.backends` or `mla_core.sparse` names a `BackendInfo` or `SparseInfo`, or
a function without arguments that returns one. The module it lives in must not import torch.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from mla_core.capabilities import Capabilities, Choice, Stage
from mla_core.errors import IncompatiblePlugin
from mla_core.spec import AUTO, NAME_PATTERN

__all__ = ["HOOK_API", "BackendInfo", "PluginInfo", "SparseInfo", "accepted_apis", "validation_problems"]

# Version of the contract between core and plugins: manifests, kernel signatures, hooks.
HOOK_API = 1

# Words that mean something else in a backend string or in a plan.
RESERVED = (AUTO, "core", "prefill", "decode")

Target = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]


def accepted_apis(current: int = HOOK_API) -> tuple[int, ...]:
    """The contract versions whose plugins can be used: the current and the previous one."""
    return tuple(version for version in (current - 1, current) if version >= 1)


class PluginInfo(BaseModel):
    """What both kinds of plugin state."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
    api: int = 1
    # Import path of the class that does the work, "package.module:Class"; imported when the plugin is chosen.
    target: Target
    # Options accepted in the backend string; None: none.
    options: type[BaseModel] | None = None
    summary: str = ""
    # Import path of a function without arguments that `mla doctor` calls: what this machine lacks, as a
    # list of Reason. Its module must not import torch. None: nothing beyond the required packages.
    doctor: Target | None = None
    # Filled by the registry.
    distribution: str | None = None
    version: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _speaks_our_api(cls, data: Any) -> Any:
        # Before the fields: a manifest of a later version may have some that we do not know.
        api = data.get("api", 1) if isinstance(data, dict) else 1
        if isinstance(api, int) and api not in accepted_apis():
            raise IncompatiblePlugin(str(data.get("name")), "this distribution", api, accepted_apis())
        return data

    @field_validator("name")
    @classmethod
    def _not_reserved(cls, name: str) -> str:
        if name in RESERVED:
            raise ValueError(f"{name!r} is reserved; so are {', '.join(RESERVED)}")
        return name

    @field_serializer("options")
    def _schema(self, options: type[BaseModel] | None) -> dict[str, Any] | None:
        return None if options is None else options.model_json_schema()


class BackendInfo(PluginInfo):
    """A dense backend: what it can do, and where its kernels are."""

    capabilities: Capabilities
    # `auto` prefers the higher number, then the earlier name.
    priority: int = 0


class SparseInfo(PluginInfo):
    """A sparse hook: what it needs of the layer that it is put on."""

    # Dense backends that it can be put on, by name; None: any.
    works_with: Choice[str] | None = None
    needs_absorption: bool = True
    needs_dense_mha: bool = True
    needs_default_o_proj: bool = True
    # Stages that the hook does itself.
    owns: Choice[Stage] = frozenset()
    # Layouts of the caches it needs beside the latent one.
    aux_caches: tuple[str, ...] = ()


def validation_problems(error: ValidationError) -> list[str]:
    """What pydantic found wrong, one "field: problem" each."""
    return [f"{'.'.join(map(str, item['loc'])) or 'value'}: {item['msg']}" for item in error.errors()]
