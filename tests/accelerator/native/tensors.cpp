#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>

namespace late {
namespace {

using at::Tensor;

// A tensor in more runs than this counts as touching all that lies between them.
constexpr int64_t kMostRuns = 4096;

// Python numbers become tensors that take part in type promotion differently.
void keep_wrapped_number(const Tensor& from, const Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

Tensor empty_on_host(const Tensor& like) {
  Tensor t(at::detail::empty_strided_cpu(like.sizes(), like.strides(), like.scalar_type()));
  keep_wrapped_number(like, t);
  return t;
}

// A CPU tensor in memory that it does not own. A kernel may still resize it: then it gets memory of the CPU.
Tensor over_memory(void* data, size_t bytes, const Tensor& like) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(data, c10::kCPU), c10::GetCPUAllocator(),
                       /*resizable=*/true);
  return at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                  like.dtype());
}

struct Dimension {
  int64_t size;
  int64_t stride;  // in bytes
};

}  // namespace

size_t extent(const Tensor& t) {
  return at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size(), 0);
}

Tensor host_alias(const Tensor& t) {
  Tensor host = over_memory(t.data_ptr(), extent(t), t);
  host.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  keep_wrapped_number(t, host);
  return host;
}

Tensor alias_in_storage(const Tensor& t) {
  Tensor host = over_memory(t.storage().mutable_data(), t.storage().nbytes(), t);
  host.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  return host;
}

Tensor snapshot(const Tensor& t) {
  Tensor host = empty_on_host(t);
  if (extent(t)) std::memcpy(host.data_ptr(), t.data_ptr(), extent(t));
  return host;
}

Tensor zeros(const Tensor& t) {
  Tensor host = empty_on_host(t);
  if (extent(t)) std::memset(host.data_ptr(), 0, extent(t));
  return host;
}

Tensor make(c10::IntArrayRef size, c10::IntArrayRef stride, at::ScalarType dtype, c10::Device device) {
  c10::DeviceGuard guard(device);
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return Tensor(at::detail::empty_strided_generic(size, stride, device_memory(), keys, dtype));
}

Tensor view_of(const Tensor& base, const Tensor& geometry) {
  // The base's keys: with others the view would count as an inference tensor.
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                         base.key_set(), geometry.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(geometry.storage_offset());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(geometry.sizes(), geometry.strides());
  return view;
}

void reshape_to(const Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride) {
  size_t need = at::detail::computeStorageNbytes(size, stride, t.element_size(), t.storage_offset());
  if (need > t.storage().nbytes()) resize_storage(t.storage().unsafeGetStorageImpl(), need);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  c10::DeviceGuard guard(storage->device());
  c10::DataPtr fresh = device_memory()->allocate(bytes);
  size_t kept = std::min(bytes, storage->nbytes());
  if (kept) device_memory()->copy_data(fresh.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

std::vector<int64_t> dense_strides(c10::IntArrayRef size) {
  std::vector<int64_t> stride(size.size(), 1);
  for (int64_t i = static_cast<int64_t>(size.size()) - 2; i >= 0; --i)
    stride[i] = stride[i + 1] * std::max<int64_t>(size[i + 1], 1);
  return stride;
}

void add_ranges(std::vector<Range>& ranges, const Tensor& t) {
  if (t.numel() == 0) return;
  const auto begin = reinterpret_cast<uintptr_t>(t.data_ptr());
  std::vector<Dimension> dimensions;
  for (int64_t i = 0; i < t.dim(); ++i)
    if (t.size(i) > 1 && t.stride(i) != 0) dimensions.push_back({t.size(i), t.stride(i) * t.element_size()});
  std::sort(dimensions.begin(), dimensions.end(), [](auto& a, auto& b) { return a.stride < b.stride; });

  int64_t run = t.element_size();  // bytes without a gap
  size_t inner = 0;
  while (inner < dimensions.size() && dimensions[inner].stride <= run) {
    run += dimensions[inner].stride * (dimensions[inner].size - 1);
    ++inner;
  }
  int64_t runs = 1;
  for (size_t i = inner; i < dimensions.size(); ++i) runs *= dimensions[i].size;
  if (runs > kMostRuns) {
    ranges.push_back({begin, begin + extent(t)});
    return;
  }
  for (int64_t number = 0; number < runs; ++number) {
    uintptr_t at = begin;
    int64_t rest = number;
    for (size_t i = inner; i < dimensions.size(); ++i) {
      at += rest % dimensions[i].size * dimensions[i].stride;
      rest /= dimensions[i].size;
    }
    ranges.push_back({at, at + run});
  }
}

std::vector<Tensor> tensors_of(const c10::IValue& value) {
  std::vector<Tensor> found;
  each_tensor(value, [&](const Tensor& t) { found.push_back(t); });
  return found;
}

}  // namespace late
