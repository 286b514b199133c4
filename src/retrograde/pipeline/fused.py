"""`rg.defer` declares functions of the user whose weight gradient may wait for W, as those of torch's products do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from retrograde.arguments import function
from retrograde.errors import PipelineError
from retrograde.pipeline.deferrable import DeferrableCall, lower_precision, register
from retrograde.pipeline.formulas import GradientFormulas, Linear, ParamGrads, is_column_major
from retrograde.pipeline.inlined import told_to_modes

InputGrad = Callable[[Tensor, Tensor, Tensor], Tensor]
WeightGrad = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class UserFormulas:
    """The gradient formulas that the user gave to `rg.defer`."""

    name: str
    input: InputGrad
    weight: WeightGrad

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self.input(grad, x, weight)

    def param_grads(self, grad: Tensor, x: Tensor, bias: bool) -> ParamGrads:
        found = self.weight(grad, x)
        if not bias:
            return ParamGrads(found if isinstance(found, Tensor) else found[0], None)
        if isinstance(found, Tensor):
            raise PipelineError(
                f"weight_grad of {self.name} returned one gradient, and the call has a bias; return (weight's, bias's)"
            )
        return ParamGrads(*found)


def defer(
    compute: Callable[..., Tensor], *, input_grad: InputGrad | None = None, weight_grad: WeightGrad | None = None
) -> Callable[..., Tensor]:
    """Let the weight gradient of `compute(x, weight, bias=None)` wait for W in a pipeline: call what this returns.

        linear = rg.defer(my_fused_linear)

    By default it must compute what `F.linear` computes, and its gradients are those of `F.linear`. For anything else
    give both: `input_grad(grad, x, weight)`, and `weight_grad(grad, x)`, which returns the gradient of the weight or,
    for calls with a bias, of both. It may read nothing else: at stage 3 the weight's values are on other ranks by then.
    Outside a split backward `compute` runs as it is, with its own backward. Under autocast it decides itself in which
    dtype it computes. The gradient functions get `x` and `weight` in the dtype of its result.
    """
    function("compute", compute, "a function of x, weight and perhaps bias", PipelineError)
    name = getattr(compute, "__name__", repr(compute))
    if (input_grad is None) != (weight_grad is None):
        missing = "input_grad" if input_grad is None else "weight_grad"
        raise PipelineError(f"rg.defer({name}): {missing} is missing; give both gradients, or none for a linear layer")

    def formulas_for(weight: Tensor) -> GradientFormulas:
        if input_grad is None or weight_grad is None:
            return Linear(True, is_column_major(weight.t()))
        return UserFormulas(name, input_grad, weight_grad)

    deferred = told_to_modes(compute)

    def read(x: Any, weight: Any, bias: Any = None) -> DeferrableCall | None:
        if type(x) is not Tensor:
            return None
        lowered = lower_precision(weight) is not None
        return DeferrableCall(formulas_for(weight), x, weight, bias, dtype_of_result=lowered)

    register(deferred, read)
    return deferred
