"""How torch.distributed.checkpoint reads and writes a sharded tensor: its own protocol for classes of others.

A rank's piece is a few boxes in the tensor's true shape (layout/boxes.py). So a checkpoint has nothing of ours in it:
it is read at another number of ranks, stage or grouping of units, by plain tensors and by DTensors, and the other way
round. Ranks that hold the same elements (replicas) offer the same boxes, of which torch writes one.

torch's module is imported when it asks: it takes half as long as torch itself.
"""

from typing import TYPE_CHECKING, Any

import torch

from retrograde.layout import Box, slot_boxes, view_box
from retrograde.parameters.part import Part

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class Checkpointable(Part):
    """torch's names for what it asks."""

    def __create_write_items__(self, fqn: str, object: Any) -> "list[WriteItem]":
        """What of this tensor, called `fqn`, this rank writes."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.piece)
        items = []
        for box in self._boxes():
            data = TensorWriteData(chunk=_chunk(box), properties=properties, size=self.shape)
            items.append(WriteItem(MetadataIndex(fqn, torch.Size(box.offsets)), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        """What of this tensor this rank wants to have read. torch writes it where `__get_tensor_shard__` says."""
        self.prepare_to_be_loaded()
        return [_chunk(box) for box in self._boxes()]

    def __get_tensor_shard__(self, index: "MetadataIndex") -> torch.Tensor:
        """The memory of one of those."""
        for box in self._boxes():
            if torch.Size(box.offsets) == index.offset:
                return view_box(self.slot, box, self.piece)
        raise ValueError(f"{self.called}: a checkpoint asks for {index}, of which this rank has nothing")

    def prepare_to_be_loaded(self) -> None:
        """Before a checkpoint is read into it."""

    def _boxes(self) -> list[Box]:
        mine = self.unit.layout.within(self.slot, self.unit.rank)
        if mine.start < mine.stop:
            return slot_boxes(self.slot, mine.start, mine.stop)
        if self.numel() == 0 and self.unit.rank == 0:
            return [Box((0,) * self.dim(), tuple(self.shape), 0, 0)]  # so that a checkpoint has its name
        return []


def _chunk(box: Box) -> "ChunkStorageMetadata":
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
