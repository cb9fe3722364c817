// Pinned host memory, which alone may be copied without the host's waiting.
// A block that is freed while copies use it is given back when the last of them is done.
#include "simgpu.h"

#include <atomic>
#include <cstring>

namespace simgpu {
namespace {
std::atomic<long> bytes_held{0};

struct PinnedBlock { // freed with its last holder: the tensor, or a copy
  explicit PinnedBlock(size_t size)
      : size(size), start((char*)std::aligned_alloc(64, (size + 63) / 64 * 64)) {
    bytes_held += size;
  }
  ~PinnedBlock() {
    bytes_held -= size;
    std::memset(start, 0xff, size); // who still reads it reads NaN
    std::free(start);
  }
  PinnedBlock(const PinnedBlock&) = delete;
  const size_t size;
  char* const start;
};

struct PinnedBlocks {
  std::mutex mutex;
  std::map<const char*, std::shared_ptr<PinnedBlock>> held; // by their tensors
};
PinnedBlocks& blocks() {
  static auto* only = new PinnedBlocks;
  return *only;
}

void release_pinned(void* start) {
  if (!is_owner()) return; // in a forked process the lock may be held for ever
  std::shared_ptr<PinnedBlock> last; // freed outside the lock
  std::lock_guard lock(blocks().mutex);
  const auto found = blocks().held.find((char*)start);
  if (found == blocks().held.end()) return;
  last = std::move(found->second);
  blocks().held.erase(found);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release_pinned, cpu};
    own_process();
    auto block = std::make_shared<PinnedBlock>(bytes);
    char* start = block->start;
    std::lock_guard lock(blocks().mutex);
    blocks().held[start] = std::move(block);
    return {start, start, &release_pinned, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release_pinned;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
} // namespace

c10::Allocator* pinned_allocator() {
  static auto* only = new PinnedAllocator;
  return only;
}

std::shared_ptr<void> hold_pinned(const void* address) {
  if (!is_owner()) return nullptr;
  std::lock_guard lock(blocks().mutex);
  auto next = blocks().held.upper_bound((const char*)address);
  if (next == blocks().held.begin()) return nullptr;
  const auto& block = (--next)->second;
  return (const char*)address < block->start + block->size ? block : nullptr;
}

long pinned_bytes() {
  return bytes_held;
}

bool is_pinned(const void* address) {
  return hold_pinned(address) != nullptr;
}
} // namespace simgpu
