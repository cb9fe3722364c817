// The memory of a device. It lies twice in the address space: where tensors point, the host is
// killed by SIGSEGV when it touches it, and where tasks look, it is plain memory.
// Freed memory is free for its own stream at once, as in CUDA's caching allocator, and for nobody
// before the streams that record_stream named are done with it. What is free is kept by its size.
// Memory is spoilt (0xff: floats read NaN, integers -1, bools true) when it is new. What was freed
// is spoilt at the next allocation of its stream, whatever its size, since CUDA's could be the same
// memory; not before, since a stream may wait for who still uses it, and then allocate, as FSDP2's.
#include "simgpu.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <set>
#include <vector>

namespace simgpu {
namespace {
constexpr size_t kAddresses = size_t(16) << 30; // bytes of a device's address space

using DeviceStream = std::pair<int, c10::StreamId>;

struct Block {
  size_t size;
  c10::StreamId stream;
  std::set<DeviceStream> users; // further streams, by record_stream
};

struct Memory {
  std::mutex mutex;
  char *device_side = nullptr, *task_side = nullptr;
  size_t used = 0; // bytes of the addresses that some block has had
  size_t limit = settings().memory;
  std::map<std::pair<c10::StreamId, size_t>, std::vector<size_t>> free; // offsets by stream, size
  std::map<c10::StreamId, std::vector<std::pair<size_t, size_t>>> freed; // not spoilt yet
  std::map<size_t, Block> blocks; // in use, by their offsets
  int leaving = 0; // freed, but another stream still uses them
  c10::CachingDeviceAllocator::DeviceStats stats;

  long allocated() const {
    return stats.allocated_bytes[0].current;
  }
  void open() {
    if (device_side) return;
    own_process();
    const int file = memfd_create("simgpu", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kAddresses) == 0, "simgpu: no memory file");
    const auto map = [&](int access) {
      void* at = mmap(nullptr, kAddresses, access, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(at != MAP_FAILED, "simgpu: no address space");
      return (char*)at;
    };
    task_side = map(PROT_READ | PROT_WRITE);
    madvise(task_side, kAddresses, MADV_DONTFORK);
    device_side = map(PROT_NONE);
    close(file);
  }
};

Memory& memory_of(int device) {
  static auto* all = new std::array<Memory, kMostDevices>;
  return all->at(device);
}

// Device and offset of a block as the context of its DataPtr, which is never null.
void* context_of(int device, size_t offset) {
  return (void*)(offset * kMostDevices + device + 1);
}
std::pair<int, size_t> block_at(void* context) {
  const size_t key = (size_t)context - 1;
  return {int(key % kMostDevices), key / kMostDevices};
}

std::function<void()> spoil(char* start, size_t size) {
  return [start, size] { std::memset(start, 0xff, size); };
}

void give_back(int device, size_t offset) {
  auto& memory = memory_of(device);
  std::lock_guard lock(memory.mutex);
  const auto found = memory.blocks.find(offset);
  const auto& block = found->second;
  memory.leaving -= !block.users.empty();
  memory.freed[block.stream].emplace_back(offset, block.size);
  memory.free[{block.stream, block.size}].push_back(offset);
  memory.stats.allocated_bytes[0].decrease(block.size);
  memory.blocks.erase(found);
}

void release_block(void* context) {
  if (!context || !is_owner()) return; // a forked process has no streams
  const auto [device, offset] = block_at(context);
  std::set<DeviceStream> users;
  {
    auto& memory = memory_of(device);
    std::lock_guard lock(memory.mutex);
    users = memory.blocks.at(offset).users;
    memory.leaving += !users.empty();
  }
  if (users.empty()) return give_back(device, offset);
  auto left = std::make_shared<std::atomic<size_t>>(users.size());
  const auto leave = [left, device = device, offset = offset] {
    if (--*left == 0) give_back(device, offset);
  };
  for (auto [of, stream] : users) enqueue(of, stream, leave, Delay::no);
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    const c10::Device on(kType, device);
    if (bytes == 0) return {nullptr, nullptr, &release_block, on};
    own_process();
    auto& memory = memory_of(device);
    const auto stream = current_stream(device);
    const size_t size = (bytes + 511) / 512 * 512;
    std::unique_lock lock(memory.mutex);
    memory.open();
    if (memory.allocated() + size > memory.limit && memory.leaving) {
      lock.unlock(); // as CUDA's, before it gives up
      wait_for_device(device, "allocation");
      lock.lock();
    }
    for (auto [start, length] : std::exchange(memory.freed[stream], {}))
      if (settings().poison)
        enqueue(device, stream, spoil(memory.task_side + start, length), Delay::no);
    auto& free = memory.free[{stream, size}];
    const bool fits = memory.allocated() + size <= memory.limit &&
        (!free.empty() || memory.used + size <= kAddresses);
    TORCH_CHECK_WITH(OutOfMemoryError, fits, "simgpu out of memory. Tried to allocate ",
                     double(size) / (1 << 20), " MiB, ", double(memory.allocated()) / (1 << 20),
                     " MiB are in use of ", memory.limit >> 20, " MiB");
    const bool is_new = free.empty();
    size_t offset = memory.used;
    if (is_new) {
      memory.used += size;
      memory.stats.reserved_bytes[0].increase(size);
    } else {
      offset = free.back();
      free.pop_back();
    }
    memory.blocks[offset] = {size, stream, {}};
    memory.stats.allocated_bytes[0].increase(size);
    lock.unlock();
    if (settings().poison && is_new) spoil(memory.task_side + offset, size)();
    return {memory.device_side + offset, context_of(device, offset), &release_block, on};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release_block;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    const int device = device_of(to);
    const auto copy = [to = task_address(to), from = task_address(from), bytes] {
      std::memcpy(to, from, bytes);
    };
    enqueue(device, current_stream(device), copy);
  }
  bool initialized() override {
    return is_owner();
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_use(data, stream.device_index(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(memory_of(device).mutex);
    return memory_of(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard lock(memory_of(device).mutex);
    memory_of(device).stats.allocated_bytes[0].reset_peak();
    memory_of(device).stats.reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return memory_info(device);
  }
};
} // namespace

c10::DeviceAllocator* device_allocator() {
  static auto* only = new DeviceAllocator;
  return only;
}

int device_of(const void* address) {
  for (int device = 0; device < settings().devices; ++device) {
    const char* start = memory_of(device).device_side;
    if (start && address >= start && address < start + kAddresses) return device;
  }
  return -1;
}

void* task_address(const void* address) {
  const int device = device_of(address);
  if (device < 0) return nullptr;
  auto& memory = memory_of(device);
  return memory.task_side + ((const char*)address - memory.device_side);
}

bool has_memory(int device) {
  return memory_of(device).device_side != nullptr;
}

void record_use(const c10::DataPtr& data, int device, c10::StreamId stream) {
  if (!data.get_context()) return;
  const auto [owner, offset] = block_at(data.get_context());
  auto& memory = memory_of(owner);
  std::lock_guard lock(memory.mutex);
  const auto found = memory.blocks.find(offset);
  if (found == memory.blocks.end()) return;
  if (DeviceStream user{device, stream}; user != DeviceStream{owner, found->second.stream})
    found->second.users.insert(user);
}

std::pair<size_t, size_t> memory_info(int device) {
  auto& memory = memory_of(device);
  std::lock_guard lock(memory.mutex);
  const size_t used = memory.allocated();
  return {memory.limit - std::min(used, memory.limit), memory.limit};
}

void set_memory_share(int device, double share) {
  std::lock_guard lock(memory_of(device).mutex);
  memory_of(device).limit = size_t(share * settings().memory);
}
} // namespace simgpu
