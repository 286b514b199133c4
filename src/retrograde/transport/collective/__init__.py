"""Shards and gradients by collectives of torch.distributed, in the order that ranks share (transport/order)."""

from retrograde.transport.collective.transport import CollectiveStart, CollectiveTransport

__all__ = ["CollectiveStart", "CollectiveTransport"]
