"""One hidden wait of a program: what was called where, and its cure."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.audit.cures.cure import cure
from manyhands.audit.kinds import Kind
from manyhands.audit.sites import Site


@dataclass(frozen=True)
class Stall:
    """A hidden wait; two waits are the same if their call and their lines are."""

    kind: Kind
    call: str
    site: Site
    framework: str = "torch"

    @property
    def line(self) -> str:
        """``file:line`` of the user's code."""
        return str(self.site.user)

    @property
    def cure(self) -> str:
        return self.cure_if(rare=False)

    def cure_if(self, *, rare: bool) -> str:
        """The cure; ``rare``: the wait happens in a few steps only."""
        library = self.site.library.file if self.site.library is not None else ""
        line = self.site.user
        place = line.file, line.number
        return cure(self.kind, self.call, line.code, library, framework=self.framework, place=place, rare=rare)

    def __str__(self) -> str:
        beside = f" (in {self.site.library})" if self.site.library is not None else ""
        code = f": {self.site.user.code}" if self.site.user.code else ""
        return f"{self.line}{beside}: {self.kind.title} ({self.call}){code}. Cure: {self.cure}"
