"""`torch.nn.utils.clip_grad_norm_` for the parameters of one sharded model: one meeting, and plain tensors around it.

What torch does is get_total_norm() and clip_grads_with_norm_(), in this order. Here the norm of each whole gradient is
made of every rank's part of it, and the rest is torch's own.
"""

from collections.abc import Callable

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from retrograde.coordination import Coordinator
from retrograde.parameters.leaf import ShardedParameter
from retrograde.parameters.plain import coordinators_of, leaves_in, plain_for_a_while
from retrograde.parameters.reductions import norms_of_pieces, norms_of_wholes

ClipNorm = Callable[[list[torch.Tensor], float, float, bool, bool | None], torch.Tensor]


def clip_norm(
    torchs_own: ClipNorm,
    params: list[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    leaves, owners = leaves_in(params)
    order = float(norm_type)
    coordinators = coordinators_of(owners)
    alike = len(coordinators) == 1 and len(leaves) == len(params)
    if not alike or order <= 0:  # torch's own way asks for one tensor after the other what is to be done
        return torchs_own(params, max_norm, norm_type, error_if_nonfinite, foreach)
    norms = _norms_of_gradients(coordinators[0], leaves, order)
    total = get_total_norm(norms, order, error_if_nonfinite, foreach)
    leaves[0].unit.await_gradients()
    with plain_for_a_while(leaves):
        clip_grads_with_norm_(leaves, max_norm, total, foreach)
    return total


def _norms_of_gradients(coordinator: Coordinator, leaves: list[ShardedParameter], order: float) -> list[torch.Tensor]:
    """The norms of the whole gradients, of those leaves that have one: after a meeting, the same leaves on all ranks.

    They are in one tensor if the gradients have one dtype: the norm of a number is the number, so torch makes the same
    total of it as of as many tensors, in less time. Otherwise each norm is a tensor of its gradient's dtype."""
    coordinator.flush_pending_gradients("p.grad is used")
    dtypes: list[torch.dtype] = []

    def mine() -> torch.Tensor:
        leaves[0].unit.await_gradients()
        with plain_for_a_while(leaves) as having:
            grads = [leaf.grad for leaf in having if leaf.grad is not None]
            dtypes[:] = [grad.dtype for grad in grads]
            return norms_of_pieces(grads, order) if grads else torch.empty(0, dtype=torch.double)

    label = f"norm {order:g} of the gradients of {leaves[0].slot.name} and {len(leaves) - 1} more"
    found = norms_of_wholes(coordinator.tensors(label, mine), order)
    if not dtypes:
        return []
    if len(set(dtypes)) == 1:
        return [found.to(dtypes[0].to_real())]
    return [norm.to(dtype.to_real()) for norm, dtype in zip(found.unbind(), dtypes, strict=True)]
