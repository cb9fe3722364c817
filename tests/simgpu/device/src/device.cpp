// What torch asks of a device: the hooks (is there one, its generators, its pinned memory) and the
// guard (current device and stream, events, waits).
#include "simgpu.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace simgpu {
namespace {
int valid(int device) {
  TORCH_CHECK(device < settings().devices, "simgpu error: invalid device ordinal ", device);
  return device < 0 ? current_device() : device;
}

class DeviceHooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return settings().devices > 0;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }
  at::Device getDeviceFromPtr(void* address) const override {
    const int device = device_of(address);
    TORCH_CHECK(device >= 0, "not a pointer of simgpu");
    return {kType, (c10::DeviceIndex)device};
  }
  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return has_memory(device);
  }
  void init() const override {
    own_process();
  }
  c10::DeviceIndex deviceCount() const override {
    return settings().devices;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(valid(device));
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const int before = current_device();
    set_current_device(valid(device));
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::OptionalDeviceGuard guard(storage.device());
    auto* allocator = device_allocator();
    auto larger = allocator->allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept && storage.data()) allocator->copy_data(larger.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(larger));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kType;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return settings().devices;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kType, (c10::DeviceIndex)current_device()};
  }
  void setDevice(c10::Device device) const override {
    set_current_device(valid(device.index()));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) set_current_device(device.index());
  }

  c10::Stream getStream(c10::Device device) const override {
    const int index = valid(device.index());
    return stream(index, current_stream(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(valid(device.index()), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    const int index = valid(device.index());
    return stream(index, pool_stream(index));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const int index = next.device_index();
    return stream(index, exchange_stream(index, next.id()));
  }
  bool queryStream(const c10::Stream& asked) const override {
    return is_idle(asked.device_index(), asked.id());
  }
  void synchronizeStream(const c10::Stream& waited) const override {
    wait_for_stream(waited.device_index(), waited.id(), "stream.synchronize");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    wait_for_device(valid(device), "device.synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& user) const override {
    record_use(data, user.device_index(), user.id());
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device,
              c10::EventFlag) const override {
    const int index = stream.device_index();
    TORCH_CHECK(device < 0 || device == index, "Event device ", (int)device,
                " does not match recording stream's device ", index);
    if (!*event) *event = new MarkPtr;
    mark(*event) = simgpu::record(index, stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) let_wait(stream.device_index(), stream.id(), mark(event));
  }
  bool queryEvent(void* event) const override {
    return !event || mark(event)->is_done();
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    count_wait("event.synchronize");
    host_wait(mark(event));
  }
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    TORCH_CHECK(start && end && queryEvent(start) && queryEvent(end),
                "Both events must be completed before calculating elapsed time.");
    using Milliseconds = std::chrono::duration<double, std::milli>;
    return Milliseconds(mark(end)->time - mark(start)->time).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }

 private:
  static c10::Stream stream(int device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
  }
  static MarkPtr& mark(void* event) {
    return *static_cast<MarkPtr*>(event);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
} // namespace

void register_device() {
  c10::SetAllocator(kType, device_allocator());
  at::RegisterPrivateUse1HooksInterface(new DeviceHooks);
}
} // namespace simgpu
