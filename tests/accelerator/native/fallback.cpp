// Every operator without a kernel of its own comes here: it is queued on the current stream, and the CPU's kernel runs
// when its turn comes.
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <cstring>
#include <set>

#include "prediction.h"
#include "tensors.h"

namespace late {
namespace {

using at::Tensor;
using c10::IValue;

// Operators that move bytes without changing them, for the counter of copies.
const std::set<std::string>& copying_operators() {
  static const std::set<std::string> names{"aten::clone", "aten::cat", "aten::cat.out", "aten::_foreach_copy_",
                                           "aten::split_with_sizes_copy.out", "aten::stack", "aten::repeat"};
  return names;
}

bool is_indexing(const std::string& name) {
  return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0;
}

// Indices may be on the CPU, as on any accelerator; what is indexed may not.
bool may_be_on_host(const std::string& name, size_t argument) {
  return name == "aten::_foreach_copy_" || (is_indexing(name) && argument > 0);
}

// One call of an operator, and what its schema says about the arguments.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op),
        schema_(op.schema()),
        name_(c10::toString(op.operator_name())),
        args_(stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size()), stack->end()),
        device_(kLate, static_cast<c10::DeviceIndex>(current_device())) {
    choose_device();
    stream_ = current_stream(device_.index());
  }

  // What goes back onto torch's stack.
  Stack run() {
    c10::DeviceGuard guard(device_);
    if (is_view()) return {view()};
    check_host_tensors();
    PredictionPtr prediction;
    at::Generator drawn = draw();
    if (!needs_values()) prediction = predict(op_, args_);
    runtime().count([&](Counters& counters) { counters.operators[name_]++; });
    if (prediction) return queue(*prediction, drawn);
    if (drawn.defined()) restore(drawn);  // the dry run failed: draw again
    return run_now();
  }

 private:
  void choose_device() {
    bool found = false;
    for (const IValue& value : args_) {
      each_tensor(value, [&](const Tensor& t) {
        if (!on_device(t)) return;
        TORCH_CHECK(!found || t.device() == device_, "late: ", name_, " is given tensors of two devices, ", device_,
                    " and ", t.device());
        device_ = t.device();
        found = true;
      });
      if (!found && value.isDevice() && value.toDevice().type() == kLate)
        device_ = c10::Device(kLate, static_cast<c10::DeviceIndex>(index_of(value.toDevice())));
    }
  }

  void check_host_tensors() const {
    for (size_t i = 0; i < args_.size(); ++i)
      each_tensor(args_[i], [&](const Tensor& t) {
        if (may_be_on_host(name_, i)) return;
        TORCH_CHECK(on_device(t) || (t.dim() == 0 && !written(i)), "late: ", name_,
                    " expects all tensors on the same device, but found ", device_, " and ", t.device());
      });
  }

  bool written(size_t argument) const {
    const auto* alias = schema_.arguments()[argument].alias_info();
    return alias && alias->isWrite();
  }

  // The argument that a result is, if it is written in place; else -1.
  int argument_of(size_t result) const {
    const auto* alias = schema_.returns()[result].alias_info();
    if (!alias) return -1;
    for (size_t i = 0; i < args_.size(); ++i) {
      const auto* other = schema_.arguments()[i].alias_info();
      if (other && other->beforeSets() == alias->beforeSets() && written(i)) return static_cast<int>(i);
    }
    return -1;
  }

  bool is_view() const {
    if (schema_.returns().size() != 1 || !args_[0].isTensor()) return false;
    const auto* alias = schema_.returns()[0].alias_info();
    return alias && !alias->isWrite();
  }

  // Geometry alone, no work for the device.
  IValue view() const {
    const Tensor base = args_[0].toTensor();
    Stack stack = args_;
    stack[0] = alias_in_storage(base);
    run_on_cpu(op_, stack);
    return convert(stack.back(), [&](const Tensor& t) { return view_of(base, t); });
  }

  // Operators whose results have a shape, or are values, that only the numbers tell: the host has to wait for them.
  bool needs_values() const {
    const std::string& name = op_.operator_name().name;
    if (name.rfind("aten::", 0) != 0) return true;  // may be Python, which must not run as a job
    for (const auto& result : schema_.returns()) {
      const auto& type = result.type();
      if (type->kind() != c10::TypeKind::TensorType && !type->isSubtypeOf(*c10::ListType::ofTensors())) return true;
    }
    if (op_.hasTag(at::Tag::data_dependent_output)) return true;
    // These draw from the default generator behind our back.
    if (is_random(op_, args_) && generator_argument() < 0) return true;
    if (is_indexing(name)) return has_mask();
    return op_.hasTag(at::Tag::dynamic_output_shape);
  }

  bool has_mask() const {
    for (const IValue& value : args_) {
      if (!value.isOptionalTensorList()) continue;
      for (const auto& t : value.toOptionalTensorVector())
        if (t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte)) return true;
    }
    return false;
  }

  int generator_argument() const {
    for (size_t i = 0; i < args_.size(); ++i)
      if (schema_.arguments()[i].name() == "generator") return static_cast<int>(i);
    return -1;
  }

  at::Generator generator() const {
    const IValue& value = args_[static_cast<size_t>(generator_argument())];
    return value.isGenerator() ? value.toGenerator() : at::detail::getDefaultCPUGenerator();
  }

  // Random numbers are those of the moment of issue: the job gets a copy of the generator as it is now, and the dry run
  // moves the original on.
  at::Generator draw() const {
    if (!is_random(op_, args_) || generator_argument() < 0) return {};
    at::Generator original = generator();
    std::lock_guard<std::mutex> lock(original.mutex());
    return original.clone();
  }

  void restore(const at::Generator& copy) const {
    at::Generator original = generator();
    std::lock_guard<std::mutex> lock(original.mutex());
    original.set_state(copy.get_state());
  }

  Accesses accesses() const {
    Accesses found;
    for (size_t i = 0; i < args_.size(); ++i)
      each_tensor(args_[i], [&](const Tensor& t) {
        if (on_device(t)) add_ranges(written(i) ? found.writes : found.reads, t);
      });
    return found;
  }

  void count_copy(const Accesses& touched) const {
    if (!copying_operators().count(name_)) return;
    int64_t bytes = 0;
    for (const Range& range : touched.writes) bytes += static_cast<int64_t>(range.end - range.begin);
    runtime().count([&](Counters& counters) { counters.copied(name_, bytes); });
  }

  // out= arguments take the geometry that the kernel gave them.
  void adopt_geometry(const Stack& after) const {
    for (size_t i = 0; i < args_.size(); ++i) {
      if (!written(i)) continue;
      auto real = tensors_of(args_[i]), shapes = tensors_of(after[i]);
      for (size_t k = 0; k < real.size(); ++k)
        if (real[k].sizes() != shapes[k].sizes() || real[k].strides() != shapes[k].strides())
          reshape_to(real[k], shapes[k].sizes(), shapes[k].strides());
    }
  }

  IValue result(size_t number, const IValue& geometry) const {
    int argument = argument_of(number);
    if (argument >= 0) return args_[static_cast<size_t>(argument)];
    return convert(geometry, [&](const Tensor& t) { return make(t.sizes(), t.strides(), t.scalar_type(), device_); });
  }

  Stack queue(const Prediction& prediction, const at::Generator& drawn) const {
    adopt_geometry(prediction.arguments);
    Accesses touched = accesses();
    Stack results, targets;
    for (size_t i = 0; i < prediction.results.size(); ++i) {
      results.push_back(result(i, prediction.results[i]));
      bool in_place = argument_of(i) >= 0;
      targets.push_back(in_place ? IValue() : convert(results.back(), &host_alias));
      if (!in_place) each_tensor(results.back(), [&](const Tensor& t) { add_ranges(touched.writes, t); });
    }
    count_copy(touched);
    Stack real = replace_tensors(args_, [](const Tensor& t) { return on_device(t) ? host_alias(t) : snapshot(t); });
    if (drawn.defined()) real[static_cast<size_t>(generator_argument())] = drawn;
    Stack places;
    for (size_t i = 0; i < args_.size(); ++i) places.push_back(written(i) ? convert(args_[i], &host_alias) : IValue());
    // Whichever thread runs it: an LSTM leaves its workspace out where gradients are off, as in autograd's threads.
    auto job = [op = op_, real, places, targets, grads = c10::GradMode::is_enabled()] {
      c10::AutoGradMode mode(grads);
      execute(op, real, places, targets);
      return true;
    };
    runtime().issue(stream_, {name_, std::move(job), nullptr, false}, touched);
    return results;
  }

  // The job: the CPU's kernel, and its results copied to where they belong.
  static void execute(const c10::OperatorHandle& op, const Stack& real, const Stack& places, const Stack& targets) {
    Stack stack = real;
    try {
      run_on_cpu(op, stack);
    } catch (const c10::Error& e) {
      throw std::runtime_error(e.what_without_backtrace());
    }
    for (size_t i = 0; i < places.size(); ++i) bring_back(real[i], places[i]);
    for (size_t i = 0; i < targets.size(); ++i) bring_back(stack[i], targets[i]);
  }

  // Copies what a kernel has put elsewhere: new results, and arguments that it made larger on the way.
  static void bring_back(const IValue& from, const IValue& to) {
    auto sources = tensors_of(from), targets = tensors_of(to);
    for (size_t k = 0; k < targets.size(); ++k) {
      const Tensor &source = sources[k], &target = targets[k];
      TORCH_CHECK(source.sizes() == target.sizes() && source.strides() == target.strides(),
                  "a result has another geometry than foreseen");
      if (source.data_ptr() != target.data_ptr()) std::memcpy(target.data_ptr(), source.data_ptr(), extent(target));
    }
  }

  // The host waits for the stream and runs the kernel itself.
  Stack run_now() const {
    runtime().issue(stream_, {name_, nullptr, nullptr, false}, accesses());
    runtime().synchronize(stream_, name_);
    Stack real = replace_tensors(args_, [](const Tensor& t) { return on_device(t) ? host_alias(t) : t; });
    Stack stack = real;
    run_on_cpu(op_, stack);
    adopt_geometry(real);
    runtime().synchronize(stream_, "");  // an argument that was made larger is on its way to its new place
    for (size_t i = 0; i < args_.size(); ++i)
      if (written(i)) bring_back(real[i], args_[i]);
    Stack results;
    for (size_t i = 0; i < stack.size(); ++i) {
      results.push_back(result(i, stack[i]));
      if (argument_of(i) >= 0) continue;
      Accesses touched;
      each_tensor(results.back(), [&](const Tensor& t) { add_ranges(touched.writes, t); });
      runtime().issue(stream_, {name_, nullptr, nullptr, false}, touched);
      bring_back(stack[i], results.back());
    }
    return results;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  const Stack args_;
  c10::Device device_;
  Stream* stream_ = nullptr;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Stack results = Call(op, stack).run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (IValue& value : results) stack->push_back(std::move(value));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace

// A composite kernel hides the fallback. Where the CPU has a kernel of its own (native_layer_norm), or chooses one by
// the device (convolution), the CPU's choice is made instead: otherwise the last bits would differ. And operators keep
// their names (add, not add.out), which is what races and counters call them.
void prefer_kernels_of_cpu() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  const std::set<std::string> choosing{"aten::convolution", "aten::convolution_backward"};
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional))
      continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU) && !choosing.count(c10::toString(name))) continue;
    library->impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace late
