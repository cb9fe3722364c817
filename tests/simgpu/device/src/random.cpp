// Random numbers: a generator a device. Each task with random numbers gets a CPU generator of its
// own, whose seed is drawn when it is called, so that streams do not change each other's numbers.
#include "simgpu.h"

#include <ATen/CPUGeneratorImpl.h>

#include <vector>

namespace simgpu {
namespace {
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(int device) {
    device_ = c10::Device(kType, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
} // namespace

at::Generator new_generator(int device) {
  return at::make_generator<Generator>(device < 0 ? current_device() : device);
}

const at::Generator& default_generator(int device) {
  static const auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kMostDevices; ++i) {
      made->push_back(new_generator(i));
      made->back().seed();
    }
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

at::Generator drawn_generator(const at::Generator* given, int device) {
  auto generator = given ? *given : default_generator(device);
  TORCH_CHECK(generator.device().type() == kType,
              "Expected a 'simgpu' device type for generator but found '",
              generator.device().type(), "'");
  std::lock_guard lock(generator.mutex());
  auto* own = static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
  return at::detail::createCPUGenerator(own->random64());
}
} // namespace simgpu
