"""The one exception that means "the user can fix this"."""

from __future__ import annotations

from teamtr_lora.common.visible import visible


class UserError(Exception):
    """A mistake the user can fix; printed as one line, exit 2. It may quote names and texts from elsewhere, so that it shows
    what would steer a terminal wherever it is printed: in a script or a notebook it is Python that prints it."""

    def __str__(self) -> str:
        return visible(super().__str__())
