// Tensors of the device as the CPU sees them, and the memory that they cover.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

#include "runtime.h"

namespace late {

constexpr auto kLate = c10::DeviceType::PrivateUse1;

inline int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
inline bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == kLate; }
inline Stream* ours(const c10::Stream& stream) { return runtime().stream(stream.device_index(), stream.id()); }
inline c10::Stream torchs(const Stream* stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kLate, static_cast<c10::DeviceIndex>(stream->device)), stream->id);
}

// Kernels run below autograd, autocast and every Python mode, whichever thread runs them.
struct KernelScope {
  c10::impl::ForceDispatchKeyGuard guard{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),  // factories inside kernels need it
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
};

// Bytes from the first element to the end of the last one.
size_t extent(const at::Tensor& t);

// The same memory as a CPU tensor. It holds no reference, as a kernel in flight holds none, so queued jobs may be
// dropped on any thread without touching Python. A kernel that makes it larger moves it elsewhere.
at::Tensor host_alias(const at::Tensor& t);
// As host_alias(), but of the whole storage, so that views can be made of it.
at::Tensor alias_in_storage(const at::Tensor& t);
// CPU tensors of the same geometry: with the same values, or zeros.
at::Tensor snapshot(const at::Tensor& t);
at::Tensor zeros(const at::Tensor& t);

// A new tensor of the device.
at::Tensor make(c10::IntArrayRef size, c10::IntArrayRef stride, at::ScalarType dtype, c10::Device device);
// A view of base's storage with the geometry of a CPU tensor.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& geometry);
void reshape_to(const at::Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride);
void resize_storage(c10::StorageImpl* storage, size_t bytes);
std::vector<int64_t> dense_strides(c10::IntArrayRef size);

// The memory that a tensor covers: one range if it is dense, else one for each of its runs.
void add_ranges(std::vector<Range>& ranges, const at::Tensor& t);

// guard.cpp
c10::Allocator* device_memory();

// Calls f for every defined tensor, and puts what it returns in its place. Devices become the CPU.
template <class F>
c10::IValue convert(const c10::IValue& value, F&& f) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& t : value.toTensorVector()) out.push_back(t.defined() ? f(t) : t);
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const auto& t : value.toOptionalTensorVector())
      out.push_back(t && t->defined() ? std::optional<at::Tensor>(f(*t)) : t);
    return out;
  }
  if (value.isDevice()) return c10::IValue(c10::Device(c10::kCPU));
  return value;
}

template <class F>
void each_tensor(const c10::IValue& value, F&& f) {
  if (value.isDevice()) return;
  convert(value, [&](const at::Tensor& t) {
    f(t);
    return t;
  });
}

std::vector<at::Tensor> tensors_of(const c10::IValue& value);

}  // namespace late
