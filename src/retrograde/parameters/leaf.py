"""The leaf: what a parameter is after sharding. The same object, of our class, on a flat piece of the shard."""

import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from retrograde.errors import UnsupportedError
from retrograde.parameters.copies import StateDictCopies
from retrograde.parameters.masters import with_values_of
from retrograde.parameters.owner import Owner
from retrograde.parameters.part import USED_TOGETHER
from retrograde.parameters.sharded_tensor import Computed, ParameterView, ShardedGradient, ShardedTensor, become, turn
from retrograde.torch_internals import (
    raw_grad,
    set_data,
    set_raw_grad,
    set_requires_grad,
    take_hooks,
    version_of,
    with_torch_function,
    without_torch_function,
)


class ShardedParameter(ShardedTensor, nn.Parameter):
    """`p` is the parameter: its shape is the whole's, `p.local` this rank's piece, `p.full_tensor()` all of it."""

    of_weights = True
    copies: StateDictCopies | None
    views: "MutableMapping[ParameterView, None]"  # the parameter views that are alive

    @staticmethod
    def adopt(param: nn.Parameter, owner: Owner, place: int) -> None:
        """Turn a plain parameter, whose data is already the piece, into a sharded one. Identity is kept."""
        leaf = become(param, ShardedParameter, weakref.ref(owner), place, owner.unit.layout.slots[place].shape)
        leaf.views = WeakTensorKeyDictionary()
        leaf.copies = None
        # Hooks registered before sharding get the same treatment as those registered after it. Their tables stay what
        # they are, so that the handles users hold still remove them.
        before, after = take_hooks(leaf)
        if before:
            leaf.register_hook(lambda grad: _run_all(before, grad))
        if after:
            leaf.register_post_accumulate_grad_hook(lambda leaf: _run_each(after, leaf))

    # ---- the piece and the whole
    @property
    def piece(self) -> torch.Tensor:
        return self.unit.pieces[self.place]

    def full_tensor(self) -> torch.Tensor:
        """The whole, in the parameter's graph and dtype. If there are masters beside the page, it is a copy of them."""
        if not self.unit.has_masters:
            return self.shown()
        whole = self.whole_masters()
        return with_values_of(whole, self.shown()) if torch.is_grad_enabled() and self.requires_grad else whole

    def whole_masters(self) -> torch.Tensor:
        """A copy of all ranks' masters, in no graph."""
        self.check_copies()
        return self.owner.masters(self.place)

    def shown(self) -> torch.Tensor:
        if self.copies is not None:
            self.copies.check()
        return self.owner.shown(self.place)

    def reshaped(self, data: torch.Tensor, shape: torch.Size) -> ParameterView:
        view = become(data, ParameterView, self._owner, self.place, shape)
        self.views[view] = None
        return view

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Copy `value` into the shard. As in torch, earlier results of `p.data` keep the old values: as copies."""
        for view in list(self.views):
            with without_torch_function():
                set_data(view, view.clone())
            turn(view, ShardedTensor)
        with torch.no_grad():
            self.copy_(value)

    def return_to_shard(self) -> None:
        """Copy the values back into the shard if the leaf got other memory while it was plain (`p.data = value`)."""
        piece = self.piece
        with without_torch_function():
            if piece.numel() and self.data_ptr() != piece.data_ptr():
                piece.copy_(self.detach())
                set_data(self, piece)

    def prepare_to_be_loaded(self) -> None:
        raise UnsupportedError(
            f"{self.called}: reading a checkpoint into the parameter itself, while other ranks may read it: load into "
            f"engine.state_dict(), and give that to engine.load_state_dict()"
        )

    # ---- gradients
    @property
    def requires_grad(self) -> bool:
        return self.unit.trained[self.place]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        set_requires_grad(self, value)
        self.unit.trained[self.place] = bool(value)

    def requires_grad_(self, requires_grad: bool = True) -> "ShardedParameter":
        self.requires_grad = requires_grad
        return self

    @property
    def grad(self) -> torch.Tensor | None:
        owner = self._owner()
        if owner is not None:
            owner.bring_gradients("p.grad was read")
        with without_torch_function():
            raw = raw_grad(self)
        if raw is not None and owner is not None:
            owner.unit.await_gradients()
        if raw is not None and type(raw) is not ShardedGradient:
            become(raw, ShardedGradient, self._owner, self.place, self._shape)
        return raw

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if not self.orphaned:
            self.coordinator.catch_up_on_gradients(USED_TOGETHER)
            self.owner.forget_gradient(self.place)
        if value is not None:
            value = self._as_gradient(value)
            if isinstance(value, Computed):  # from now on a view must not make it whole: the update needs the piece
                turn(value, ShardedGradient)
        set_raw_grad(self, value)

    grad = grad.deleter(lambda self: setattr(self, "grad", None))  # type: ignore[attr-defined]

    def _as_gradient(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a value that is to be the gradient. A wrong shape raises, as in torch."""
        if isinstance(value, ShardedTensor):
            if value.shape == self._shape and value.cut_like(self):
                return value.clone() if value.of_weights else value
            value = value.full_tensor().detach()
        if value.shape != self._shape:
            raise RuntimeError(
                f"{self.called}: assigned grad has data of a different size: {list(value.shape)}, the parameter's is "
                f"{list(self._shape)}"
            )
        return self.cut(value).to(self.device)

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """Register a hook as torch's does. It runs once for each reduction, with the reduced gradient. A unit's node
        runs for all parameters of the unit; for those without a gradient the hook is not called, as in torch."""

        def run(grad: torch.Tensor | None) -> Any:
            if grad is None:
                return None
            self.owner.note_hooks(self.place)
            # Not as something computed, which a view makes whole: it is autograd's own tensor, and goes on from here.
            given = become(grad, ShardedTensor, self._owner, self.place, self._shape)
            with with_torch_function():
                changed = hook(given)
            return changed if changed is None else self._as_gradient(changed)

        with without_torch_function():
            return super().register_hook(run)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """Register a hook as torch's does. It runs when a reduced gradient has been added to `.grad`, which a window
        delays to its end."""

        def arrived(leaf: torch.Tensor) -> Any:
            if not self.owner.gradient_arrived(self.place):
                return None
            self.owner.note_hooks(self.place)
            with with_torch_function():
                return hook(leaf)  # torch raises if it is anything

        with without_torch_function():
            return super().register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    # ---- state dicts
    @torch.inference_mode(mode=False)
    def copy_for(self, destination: Mapping[str, object]) -> torch.Tensor:
        """The copy of the parameter for a state dict (copies.py)."""
        full = self.whole_masters() if self.unit.has_masters else self.shown()
        if self.copies is None:
            self.copies = StateDictCopies(self.slot.name, self.unit.grid.rank, full.dtype, full.device)
        return self.copies.copy(full, version_of(self.unit.pieces[self.place]), destination)

    def check_copies(self) -> None:
        if self.copies is not None:
            self.copies.check()

    def forget_writes_to_copies(self) -> None:
        if self.copies is not None:
            self.copies.forget_writes()

    # ---- copies
    def _copied(self, data: torch.Tensor) -> ShardedTensor:
        copied = self.derive(data)
        copied._is_param = True  # makes isinstance(copy, nn.Parameter) true
        copied.requires_grad_(self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"parameter {self.slot.name} is sharded and cannot be pickled: other ranks have other pieces. "
            f"Use p.full_tensor() or engine.full_params() for the whole, or save model.state_dict()"
        )


def _run_all(hooks: dict[int, Callable[[torch.Tensor], Any]], grad: torch.Tensor) -> torch.Tensor:
    for hook in list(hooks.values()):
        if (changed := hook(grad)) is not None:
            grad = changed
    return grad


def _run_each(hooks: dict[int, Callable[[torch.Tensor], Any]], leaf: torch.Tensor) -> Any:
    """Run hooks up to the first that returns something, which is torch's to refuse."""
    return next((found for found in (hook(leaf) for hook in list(hooks.values())) if found is not None), None)
