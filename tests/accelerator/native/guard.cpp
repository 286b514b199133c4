// What torch asks of any device: current device and stream, events, memory, pinned memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "tensors.h"

namespace late {
namespace {

using c10::Device;
using c10::DeviceIndex;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  // torch holds events as void*: the mark of the last recording.
  static MarkPtr mark_of(void* event) { return event ? *static_cast<MarkPtr*>(event) : nullptr; }

  c10::DeviceType type() const override { return kLate; }
  Device getDevice() const override { return Device(kLate, static_cast<DeviceIndex>(current_device())); }
  void setDevice(Device device) const override {
    TORCH_CHECK(index_of(device) < device_count(), "late: there is no device ", device, ", only ", device_count());
    set_current_device(index_of(device));
  }
  void uncheckedSetDevice(Device device) const noexcept override { set_current_device(index_of(device)); }
  Device exchangeDevice(Device device) const override {
    Device old = getDevice();
    setDevice(device);
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(device_count()); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return c10::DeviceCapability(); }

  c10::Stream getStream(Device device) const override { return torchs(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(Device device) const override { return torchs(runtime().stream(index_of(device), 0)); }
  c10::Stream getNewStream(Device device, int) const override { return torchs(runtime().next_of_pool(index_of(device))); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream old = getStream(stream.device());
    set_current_stream(ours(stream));
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return ours(stream); }
  bool queryStream(const c10::Stream& stream) const override { return runtime().query(ours(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    runtime().synchronize(ours(stream), "Stream.synchronize");
  }
  bool isStreamCapturing(const c10::Stream& stream) const override { return runtime().is_capturing(ours(stream)); }
  void synchronizeDevice(DeviceIndex device) const override { runtime().synchronize_device(device, "synchronize"); }

  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr;
    *static_cast<MarkPtr*>(*event) = runtime().record(ours(stream));
  }
  void block(void* event, const c10::Stream& stream) const override { runtime().wait(ours(stream), mark_of(event)); }
  bool queryEvent(void* event) const override { return runtime().query(mark_of(event)); }
  void synchronizeEvent(void* event) const override { runtime().synchronize(mark_of(event), "Event.synchronize"); }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<MarkPtr*>(event); }
  double elapsedTime(void*, void*, DeviceIndex) const override { return 0; }  // there is no time here
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    runtime().record_use(data.get(), ours(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void release(void* data) { runtime().free(data); }

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    void* data = runtime().allocate(bytes, current_stream(device));
    return {data, data, &release, Device(kLate, static_cast<DeviceIndex>(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    auto copy = [=] {
      std::memcpy(to, from, bytes);
      return true;
    };
    auto range = [&](const void* data) {
      auto begin = reinterpret_cast<uintptr_t>(data);
      return Range{begin, begin + bytes};
    };
    runtime().issue(current_stream(current_device()), {"copy_data", copy, nullptr, false}, {{range(from)}, {range(to)}});
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}  // a stale pointer must stay readable
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    runtime().record_use(data.get(), ours(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    const Usage usage = runtime().usage(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto set = [](c10::CachingAllocator::StatArray& array, int64_t current, int64_t peak) {
      array[0].current = current;
      array[0].peak = peak;
    };
    set(stats.allocated_bytes, usage.current, usage.peak);
    set(stats.active_bytes, usage.current, usage.peak);
    set(stats.reserved_bytes, usage.reserved, usage.reserved);
    set(stats.allocation, usage.blocks, usage.blocks);
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { runtime().reset_peak(device); }
};

Memory* memory() {
  static Memory* one = new Memory;
  return one;
}

// Ordinary host memory that the device may read and write on its own, when a copy runs.
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = runtime().allocate_pinned(bytes);
    return {data, data, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count()); }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(current_device()); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    DeviceIndex old = getCurrentDevice();
    set_current_device(device);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 || device >= device_count() ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return runtime().is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static auto* one = new PinnedMemory;
    return one;
  }
  Device getDeviceFromPtr(void* data) const override {
    return Device(kLate, static_cast<DeviceIndex>(runtime().device_of(data)));
  }
  // Random operators draw from the CPU's generators, in the order in which they are issued.
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

}  // namespace

c10::Allocator* device_memory() { return memory(); }

void register_device() {
  c10::SetAllocator(kLate, memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

}  // namespace late
