// Operators with kernels of their own: new tensors, storages, copies, and whatever asks for a value.
#include <ATen/EmptyTensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "tensors.h"

namespace late {
namespace {

using at::Tensor;
using c10::Device;

Device device_or_current(std::optional<Device> device) {
  return Device(kLate, static_cast<c10::DeviceIndex>(device ? index_of(*device) : current_device()));
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_or_current(device));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return Tensor(at::detail::empty_generic(size, device_memory(), keys, c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  return make(size, stride, c10::dtype_or_default(dtype), device_or_current(device));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  if (self.sizes() != size) reshape_to(self, size, dense_strides(size));
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  const auto dense = dense_strides(size);
  impl->set_sizes_and_strides(size, stride.size() == size.size() ? stride : c10::IntArrayRef(dense));
  return self;
}

Tensor& set_source_storage(Tensor& self, at::Storage source) {
  std::vector<int64_t> size{static_cast<int64_t>(source.nbytes()) / self.element_size()}, stride{1};
  return set_storage(self, std::move(source), 0, size, stride);
}

Tensor& set_source_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, device_memory()->allocate(0), device_memory(), true);
  return set_storage(self, std::move(nothing), 0, {0}, {1});
}

// Queues to.copy_(from) of CPU tensors.
void queue_copy(Stream* stream, const std::string& name, const Tensor& to, const Tensor& from, const Accesses& touched) {
  const auto bytes = static_cast<int64_t>(to.nbytes());
  runtime().count([&](Counters& counters) { counters.copied(name, bytes); });
  auto job = [to, from] {
    KernelScope scope;
    to.copy_(from);
    return true;
  };
  runtime().issue(stream, {name, std::move(job), nullptr, false}, touched);
}

void copy_on_device(const Tensor& src, const Tensor& dst) {
  Stream* stream = current_stream(src.device().index());
  Stream* other = current_stream(dst.device().index());
  Accesses touched;
  add_ranges(touched.reads, src);
  add_ranges(touched.writes, dst);
  if (other != stream) runtime().wait(stream, runtime().record(other));
  queue_copy(stream, "copy on the device", host_alias(dst), host_alias(src), touched);
  if (other != stream) runtime().wait(other, runtime().record(stream));
}

// Pageable memory is read at once, as by a driver that stages it. Pinned memory is read when the copy runs, so the
// program must not write there before, and the memory lives at least until then.
void copy_from_host(const Tensor& src, const Tensor& dst, bool non_blocking) {
  Stream* stream = current_stream(dst.device().index());
  Accesses touched;
  add_ranges(touched.writes, dst);
  if (src.numel() && runtime().is_pinned(src.data_ptr())) {
    add_ranges(touched.reads, src);
    queue_copy(stream, "copy from the host", host_alias(dst), host_alias(src), touched);
    runtime().record_use(src.data_ptr(), stream);
  } else {
    queue_copy(stream, "copy from the host", host_alias(dst), snapshot(src), touched);
  }
  if (!non_blocking) runtime().synchronize(stream, "copy from the host");
}

// Only pinned memory can be written later; for pageable memory the driver makes the host wait.
void copy_to_host(const Tensor& src, const Tensor& dst, bool non_blocking) {
  Stream* stream = current_stream(src.device().index());
  const bool pinned = dst.numel() && runtime().is_pinned(dst.data_ptr());
  Accesses touched;
  add_ranges(touched.reads, src);
  if (pinned) add_ranges(touched.writes, dst);
  queue_copy(stream, "copy to the host", host_alias(dst), host_alias(src), touched);
  if (pinned) runtime().record_use(dst.data_ptr(), stream);
  if (!pinned || !non_blocking) runtime().synchronize(stream, "copy to the host");
}

Tensor copy_from(const Tensor& src, const Tensor& dst, bool non_blocking) {
  if (on_device(src) && on_device(dst)) {
    copy_on_device(src, dst);
  } else if (on_device(dst)) {
    copy_from_host(src, dst, non_blocking);
  } else {
    copy_to_host(src, dst, non_blocking);
  }
  return dst;
}

at::Scalar item(const Tensor& self) {
  Stream* stream = current_stream(self.device().index());
  Accesses touched;
  add_ranges(touched.reads, self);
  runtime().issue(stream, {"item", nullptr, nullptr, false}, touched);
  runtime().synchronize(stream, "item");
  KernelScope scope;
  return host_alias(self).item();
}

void record_stream(Tensor& self, c10::Stream stream) {
  runtime().record_use(self.storage().mutable_data(), ours(stream));
}

// Attention takes the route that it would take on the CPU.
int64_t attention_route(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                        double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  KernelScope scope;
  std::optional<Tensor> host_mask;
  if (mask && mask->defined()) host_mask = host_alias(*mask).set_requires_grad(mask->requires_grad());
  auto host = [](const Tensor& t) { return host_alias(t).set_requires_grad(t.requires_grad()); };
  return at::_fused_sdp_choice(host(query), host(key), host(value), host_mask, dropout, is_causal, scale, enable_gqa);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Storage", set_source_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_source_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
}

}  // namespace

const at::native::fused_sdp_choice_fn attention_route_of_device = &attention_route;

}  // namespace late

namespace at::native {
// torch's attention asks this table, and not the operator.
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, late::attention_route_of_device);
}  // namespace at::native
