"""The tables of methods and add-ons that recipes name, and what modules that fill them make methods of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from inspect import isclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import create_model

from fedloom.core.lazy import lazy
from fedloom.core.settings import renamed
from fedloom.core.settings.registry import R, Registered, Registry

if TYPE_CHECKING:
    from fedloom.core.codecs import Codec as Codec
    from fedloom.core.codecs import Cropped as Cropped
    from fedloom.core.codecs import Sparse as Sparse
    from fedloom.core.codecs import Unified as Unified
    from fedloom.core.layout import ALL_BUT_ENCODER as ALL_BUT_ENCODER
    from fedloom.core.layout import EVERYTHING as EVERYTHING
    from fedloom.core.layout import Select as Select
    from fedloom.core.layout import as_select as as_select
    from fedloom.core.server import Adaptive as Adaptive
    from fedloom.core.server import Lookahead as Lookahead
    from fedloom.core.server import Momentum as Momentum
    from fedloom.core.server import Plain as Plain
    from fedloom.core.server import ServerRule as ServerRule
    from fedloom.methods.method import Apart as Apart
    from fedloom.methods.method import Beside as Beside
    from fedloom.methods.method import EachTask as EachTask
    from fedloom.methods.method import InOnePlace as InOnePlace
    from fedloom.methods.method import Method as Method
    from fedloom.methods.method import Own as Own
    from fedloom.methods.method import Received as Received
    from fedloom.training.rules import Phase as Phase
    from fedloom.training.rules import Tune as Tune

__getattr__, __dir__ = lazy(__name__)  # what methods are made of imports torch, and modules that register must not


class AddOns(Registry):
    """Add-ons; the method that one returns is called as in a recipe: 'fedavg + feddea'.

    The class of a stage, under a name `package.module:Class`, is an add-on too. A stage that combines the rows takes
    the place of the method's mean. Any other is added at the client or the server as its key `at` says; without that
    at the client where it changes each row alone, else at the server.
    """

    def of(self, name: str, thing: Any, source: str = "", package: str = "") -> Registered:
        entry = super().of(name, thing, source, package)
        if not (isclass(thing) and hasattr(thing, "traits")):
            return entry

        def added(method: Method, *, at: Literal["edge", "server"] | None = None, **params: Any) -> Method:
            stage = entry.make(**params)
            if stage.traits.reduces and at != "edge":
                return method.combined_by(stage)
            return method.plus(stage, at or ("edge" if stage.traits.kind == "row" else "server"))

        at: Any = (Literal["edge", "server"] | None, None)
        model = create_model(f"{self.kind}:{name}", __base__=entry.params, at=at)
        return replace(entry, function=wraps(thing, updated=())(added), params=model, takes=1)

    def register(
        self, name: str, source: str = "", order: Sequence[str] = (), note: str = ""
    ) -> Callable[[Callable[..., R]], Callable[..., R]]:
        add = super().register(name, source, order, note)

        def named(function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(function)
            def renamed_method(method: Method, **params: Any) -> Any:
                return replace(function(method, **params), name=f"{method.name} + {name}")

            return add(renamed_method)

        return named


METHODS = Registry("method", "fedloom.methods", ("fedloom.methods.method:Method",), renamed.METHODS)
"""Functions (*, parameters) -> Method."""
ADDONS = AddOns("add-on", "fedloom.addons", ("fedloom.methods.method:Method", "fedloom.core.stage:Stage"))
"""Functions (method, *, parameters) -> Method, and classes of stages."""

Shared = Literal["everything", "encoder"]
"""The values of a method's key `share`."""


def sharing(share: Shared, name: str, stage: Any, *local: Any, **more: Any) -> Method:
    """Return a method that shares all of the model, or its encoder alone; running statistics stay with the client."""
    from fedloom.core.layout import ALL_BUT_ENCODER
    from fedloom.methods.method import Method

    private = ALL_BUT_ENCODER if share == "encoder" else None
    return Method(name=name, local=local, stage=stage, private=private, buffers="local", **more)


REPLACES = """`feddea` acts at the client, hence before this add-on; list pcgrad and gradvac before it, too. Refused
with rules that set weights per coordinate (heal), which it would ignore, and with methods that have no plain mean to
replace (local training, or another add-on has replaced it)."""
"""The end of the pages of add-ons that replace the mean by something else."""

CODECS = Registry("codec", "fedloom.codecs", ("fedloom.core.codecs:Codec",))
"""Functions (*, parameters) -> Codec."""


@CODECS.register("raw")
def raw() -> Codec:
    """Send every value unchanged."""
    from fedloom.core.codecs import Raw

    return Raw()


@CODECS.register("sparse")
def sparse() -> Codec:
    """Send the values that are not zero, and one bit per coordinate for their places."""
    from fedloom.core.codecs import Sparse

    return Sparse()


@CODECS.register("unified")
def unified() -> Codec:
    """One vector for all tasks of a client, with a mask and a scale for each (MaTU)."""
    from fedloom.core.codecs import Unified

    return Unified()
