"""Tensors whose memory belongs to a shard or a page, so that no edit of them may go unseen."""

from typing import Any

import torch


class Watched(torch.Tensor):
    """A tensor whose memory is not given out in a way that leaves edits unseen."""

    @property
    def data(self) -> torch.Tensor:
        """Shares the version counter, unlike torch's, so that no edit goes unseen."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)

    def numpy(self, *, force: bool = False) -> Any:
        """An array to which numpy refuses to write: no counter would move, and the shard would not know."""
        array = super().numpy(force=force)
        array.flags.writeable = False
        return array
