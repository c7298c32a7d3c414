"""The attacks that a recipe may name, as functions that return an `Attack`. Free of torch at import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fedloom.core.settings.registry import Registry

if TYPE_CHECKING:
    from fedloom.training.rules import Attack

ATTACKS = Registry("attack", "fedloom.attacks", ("fedloom.training.rules:Attack",))
"""Functions (*, parameters) -> Attack."""
Factor = Annotated[float, Field(gt=0)]


@ATTACKS.register("sign-flip")
def sign_flip(*, factor: Factor = 1.0) -> Attack:
    """Send -factor times the update."""
    from fedloom.methods.robust.hostile import Scaled

    return Scaled(-factor)


@ATTACKS.register("scaled")
def scaled(*, factor: Factor = 100.0) -> Attack:
    """Send factor times the update, as in model replacement (Bagdasaryan et al., AISTATS 2020)."""
    from fedloom.methods.robust.hostile import Scaled

    return Scaled(factor)


@ATTACKS.register("gaussian")
def gaussian(*, factor: Factor = 10.0) -> Attack:
    """Send noise of factor times the update's norm in the update's place."""
    from fedloom.methods.robust.hostile import Noise

    return Noise(factor)


@ATTACKS.register("huge")
def huge(*, value: Annotated[float, Field(gt=0, le=3e38)] = 1e30) -> Attack:
    """Send this finite value in every coordinate."""
    from fedloom.methods.robust.hostile import Constant

    return Constant(value)


@ATTACKS.register("replay")
def replay() -> Attack:
    """Send the first update again and again."""
    from fedloom.methods.robust.hostile import Replay

    return Replay()


@ATTACKS.register("fake")
def fake(*, n: Annotated[int, Field(ge=1)] = 1_000_000, factor: Factor = 1000.0) -> Attack:
    """Send -1 times the update as that of n examples, and all numbers beside it (extras) times factor."""
    from fedloom.methods.robust.hostile import Fake

    return Fake(n, factor)


@ATTACKS.register("drop-out")
def drop_out() -> Attack:
    """Take part, and send nothing."""
    from fedloom.methods.robust.hostile import Silent

    return Silent()


@ATTACKS.register("label-flip")
def label_flip() -> Attack:
    """Train on wrong labels: class C - 1 - y in the place of y."""
    from fedloom.methods.robust.hostile import FlippedLabels

    return FlippedLabels()


@ATTACKS.register("ipm", source="Xie, Koyejo, Gupta, UAI 2019")
def ipm(*, factor: Factor = 2.0) -> Attack:
    """Inner-product manipulation: -factor times the mean of the honest updates. Knows the honest updates."""
    from fedloom.methods.robust.hostile import InnerProduct

    return InnerProduct(factor)


@ATTACKS.register("alie", source="Baruch, Baruch, Goldberg, NeurIPS 2019")
def alie(*, factor: Factor | None = None) -> Attack:
    """Send a little that is enough: mean - factor * standard deviation of the honest updates, coordinate by coordinate.

    Without a factor the paper's z: the largest at which more honest updates lie further away than a majority needs. It
    follows from the size of a group, and is refused where it is 0. Knows the honest updates.
    """
    from fedloom.methods.robust.hostile import LittleIsEnough

    return LittleIsEnough(factor)


@ATTACKS.register("mimic", source="Karimireddy, He, Jaggi, ICLR 2022")
def mimic() -> Attack:
    """All copy one honest client in all rounds, so that what it alone learns counts too much. Knows the honest updates.

    It is the client whose update in the first round reaches furthest along the direction of the largest variance. In
    rounds without its update each sends its own.
    """
    from fedloom.methods.robust.hostile import Mimic

    return Mimic()
