// Which process owns the simulated devices, and what is wrong with them.
// As with CUDA, a process that is forked after its parent used a device cannot use it, and the
// error of an asynchronous task is raised by a later call, and by every call from then on.
#include "simgpu.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <atomic>

namespace simgpu {
namespace {
std::atomic<pid_t> owner{0};
thread_local int device_of_thread = 0;
std::mutex error_mutex;
std::exception_ptr first_error;

long variable(const char* name, long standard) {
  const char* text = std::getenv(name);
  return text ? std::atol(text) : standard;
}
} // namespace

const Settings& settings() {
  static const Settings read{
      (int)std::min<long>(variable("SIMGPU_DEVICES", 2), kMostDevices),
      size_t(variable("SIMGPU_MEMORY_MB", 4096)) << 20,
      variable("SIMGPU_POISON", 1) != 0,
      variable("SIMGPU_DELAY_US", 0),
      variable("SIMGPU_SIDE_DELAY_US", 0)};
  return read;
}

bool is_owner() {
  return owner == getpid();
}

bool is_forked() {
  return owner != 0 && owner != getpid();
}

void own_process() {
  pid_t none = 0;
  if (owner == getpid() || owner.compare_exchange_strong(none, getpid())) return;
  TORCH_CHECK(none == getpid(), "Cannot re-initialize simgpu in forked subprocess. To use simgpu "
              "with multiprocessing, you must use the 'spawn' start method");
}

int current_device() {
  return device_of_thread;
}

void set_current_device(int device) {
  device_of_thread = device;
}

void set_error(std::exception_ptr error) {
  std::lock_guard lock(error_mutex);
  if (!first_error) first_error = error;
}

void raise_error() {
  std::exception_ptr error;
  {
    std::lock_guard lock(error_mutex);
    error = first_error;
  }
  if (!error) return;
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    TORCH_CHECK(false, "simgpu: asynchronous error of an earlier task: ",
                e.what_without_backtrace());
  } catch (const std::exception& e) {
    TORCH_CHECK(false, "simgpu: asynchronous error of an earlier task: ", e.what());
  }
}
} // namespace simgpu
