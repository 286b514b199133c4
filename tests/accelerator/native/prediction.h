// What an operator returns, without its values: the geometry of results, needed when the work is queued.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <memory>

namespace late {

using torch::jit::Stack;

// Tensors in here are on the meta device: sizes, strides and types, no memory.
struct Prediction {
  Stack arguments;  // after the call: out= arguments may have been resized
  Stack results;
};
using PredictionPtr = std::shared_ptr<const Prediction>;

void run_on_cpu(const c10::OperatorHandle& op, Stack& stack);

// Puts make(t) in the place of every tensor t, once for each tensor that occurs.
Stack replace_tensors(const Stack& args, const std::function<at::Tensor(const at::Tensor&)>& make);

// Whether it draws random numbers. Attention says so of itself, but does not without dropout.
bool is_random(const c10::OperatorHandle& op, const Stack& args);

// By a dry run of the CPU's kernel on zeros: so strides are the CPU's own, and no other kernel is needed. Remembered by
// the arguments' geometry, unless the operator draws random numbers (the dry run is what advances the generator).
// Null if the kernel refuses zeros, or everything.
PredictionPtr predict(const c10::OperatorHandle& op, const Stack& args);

}  // namespace late
