"""A dataset of a user's own that needs a secret, as a private store would; not a test."""

from dataclasses import dataclass
from typing import Any

from ddp_runner.data.sources.random import RandomRegression

SECRET = "hunter2-of-mine"


@dataclass(frozen=True)
class Noted(RandomRegression):
    """A dataset with keys for what a private store wants to know."""

    token: str = ""
    headers: Any = None
    fails: bool = False

    def dataset(self, tensors: Any) -> Any:
        """Return it, if the store takes the token."""
        assert (self.token, self.headers) == (SECRET, [{"auth": f"Bearer {SECRET}"}])
        if self.fails:
            raise RuntimeError(f"the store refuses {self.token}")
        return super().dataset(tensors)
