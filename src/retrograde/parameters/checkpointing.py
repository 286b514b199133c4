"""How torch.distributed.checkpoint reads and writes a sharded tensor: by the names that it asks for (`SavedInChunks`).

A rank's piece is a few boxes in the tensor's true shape (layout/boxes.py). So a checkpoint has nothing of retrograde's
own in it: it can be read at another number of ranks, stage or grouping of units, and by plain tensors and DTensors, and
theirs can be read here. Ranks that hold the same elements (replicas) offer the same boxes, of which torch writes one.

torch's module is imported only when torch asks: importing it takes half as long as importing torch itself.
"""

from typing import TYPE_CHECKING

import torch

from retrograde.layout import Box, slot_boxes, view_box
from retrograde.parameters.part import Part
from retrograde.torch_internals import SavedInChunks

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class Checkpointable(SavedInChunks, Part):
    """A sharded tensor, as torch.distributed.checkpoint sees it."""

    def write_items(self, name: str) -> "list[WriteItem]":
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.piece)
        items = []
        for box in self._boxes():
            data = TensorWriteData(chunk=_chunk(box), properties=properties, size=self.shape)
            items.append(WriteItem(MetadataIndex(name, torch.Size(box.offsets)), WriteItemType.SHARD, tensor_data=data))
        return items

    def chunks_to_read(self) -> "list[ChunkStorageMetadata]":
        self.prepare_to_be_loaded()
        return [_chunk(box) for box in self._boxes()]

    def chunk_memory(self, index: "MetadataIndex") -> torch.Tensor:
        for box in self._boxes():
            if torch.Size(box.offsets) == index.offset:
                return view_box(self.slot, box, self.piece)
        raise ValueError(f"{self.called}: a checkpoint asks for {index}, of which this rank has nothing")

    def prepare_to_be_loaded(self) -> None:
        """Do what is needed before a checkpoint is read into this tensor; subclasses override it."""

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
