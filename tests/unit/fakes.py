"""Declarations and installed distributions that tests of selection are made from."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mla_core.capabilities import Capabilities
from mla_core.errors import NoBackendFits, RegistryError
from mla_core.manifest import BackendInfo
from mla_core.plan import Plan
from mla_core.registry import Registry
from mla_core.request import LayerRequest
from mla_core.resolve import resolve
from mla_core.spec import Spec

# Everything that `LAYER` asks for.
FULL = {
    "devices": {"cpu"},
    "kernels": {"mha_prefill", "mqa_decode"},
    "dtypes": {"float32"},
    "layouts": {"fp32": [16, 64]},
    "query_len": {"single"},
    "heads": {"low": 1, "high": 128},
    "latent": {"low": 1},
    "nope": {"low": 1},
    "rope": {"low": 0},
    "value": {"low": 1},
    "returns": {"lse"},
}
LAYER = LayerRequest(
    device="cpu",
    dtype="float32",
    layout="fp32",
    page_size=64,
    heads=16,
    latent=512,
    nope=128,
    rope=64,
    value=128,
)
DECODE_ONLY = {"kernels": {"mqa_decode"}}
GPU = {"devices": {"sm_90"}}
ROPE_OWNER = {"owns": {"rope", "append"}, "rope_styles": {"interleaved"}}


def capabilities(**changes: object) -> Capabilities:
    """A declaration that fits LAYER, with changes."""
    return Capabilities.model_validate({**FULL, **changes})


def backend(name: str, *, priority: int = 0, options: type | None = None, **changes: object) -> BackendInfo:
    """A backend that fits LAYER, with changes to what it declares."""
    return BackendInfo(
        name=name,
        target=f"mla_{name}.backend:Backend",
        priority=priority,
        options=options,
        capabilities=capabilities(**changes),
    )


def registry(*infos: object, environ: dict[str, str] | None = None) -> Registry:
    """A registry of these plugins only."""
    made = Registry(path=[], environ=environ or {})
    for info in infos:
        made.add(info)
    return made


def plan(spec: str | Spec | None, *infos: object, **changes: object) -> Plan:
    """Resolve LAYER, with changes, among these plugins only."""
    layer = LAYER.model_copy(update=changes)
    return resolve(layer, spec, registry=registry(*infos), environ={})


def backends(made: Plan) -> tuple[str, str]:
    """Who serves prefill and who decode."""
    return made.choices.get("mha") or made.choices["mqa_prefill"], made.choices["mqa"]


def refusal(spec: str | None, *infos: object, **changes: object) -> str:
    """The whole message when nobody fits."""
    with pytest.raises(NoBackendFits) as caught:
        plan(spec, *infos, **changes)
    return str(caught.value)


def message(call: Callable[..., object], *arguments: object) -> str:
    """The whole message of the error that a call raises."""
    with pytest.raises(RegistryError) as caught:
        call(*arguments)
    return str(caught.value)


_numbers = itertools.count()

MANIFEST = """
from mla_core.capabilities import Capabilities
from mla_core.manifest import BackendInfo

INFO = BackendInfo(name="{name}", target="{module}:Kernels", capabilities=Capabilities(devices={{"cpu"}}))


class Kernels:
    pass
"""


@dataclass(frozen=True)
class Site:
    """A folder on sys.path that distributions can be put into, without an installer."""

    folder: Path

    def module(self, source: str) -> str:
        """Write a module under a name that no test used before; returns the name."""
        name = f"fake_module_{next(_numbers)}"
        (self.folder / f"{name}.py").write_text(textwrap.dedent(source), encoding="utf-8")
        return name

    def metadata(self, distribution: str, entry_points: str | bytes, version: str = "1.0") -> None:
        """What an installer leaves behind for one distribution."""
        info = self.folder / f"{distribution}-{version}.dist-info"
        info.mkdir(parents=True)
        text = entry_points.encode() if isinstance(entry_points, str) else entry_points
        (info / "entry_points.txt").write_bytes(text)

    def install(
        self,
        distribution: str,
        name: str,
        source: str = MANIFEST,
        *,
        attribute: str = "INFO",
        version: str = "1.0",
    ) -> str:
        """A distribution with one backend and this source as manifest module; returns the module's name."""
        module = f"fake_module_{next(_numbers)}"
        text = textwrap.dedent(source).format(name=name, module=module)
        (self.folder / f"{module}.py").write_text(text, encoding="utf-8")
        self.metadata(distribution, f"[mla_core.backends]\n{name} = {module}:{attribute}\n", version)
        return module

    def registry(self, **environ: str) -> Registry:
        """A registry that sees this folder only."""
        return Registry(path=[str(self.folder)], environ=environ)
