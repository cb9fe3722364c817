// What the files of the simulated GPU share: devices, streams, memory and the counts of waits.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace at {
class Tensor;
struct Generator;
} // namespace at
namespace c10 {
struct DeviceAllocator;
} // namespace c10

namespace simgpu {
constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 8;

// ---- process.cpp: the process that owns the devices, its current device, its errors
struct Settings { // read when the process first asks for one, such as how many devices there are
  int devices;
  size_t memory; // bytes a device
  bool poison;   // memory is spoilt until a task has written it, and after it was freed
  long delay_us, side_delay_us;
};
const Settings& settings();
bool is_owner();  // has this process used a device?
bool is_forked(); // has its parent?
void own_process(); // raises in a forked process whose parent has used a device
int current_device();
void set_current_device(int device);
void set_error(std::exception_ptr error); // of a task: raised later, and from then on always
void raise_error();

// ---- streams.cpp
class Mark { // one recording of an event
 public:
  void finish();
  void wait();
  bool wait_until(std::chrono::steady_clock::time_point deadline);
  bool is_done();
  std::function<void()> hurry; // lets its stream come to it without its side delay
  std::chrono::steady_clock::time_point time; // when the stream reached it

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};
using MarkPtr = std::shared_ptr<Mark>;
c10::StreamId current_stream(int device);
c10::StreamId exchange_stream(int device, c10::StreamId stream);
c10::StreamId pool_stream(int device); // one of 32, as CUDA's
c10::StreamId new_stream(int device);
enum class Delay { yes, no }; // no: bookkeeping that a GPU does not spend a task on
void enqueue(int device, c10::StreamId stream, std::function<void()> task, Delay = Delay::yes);
MarkPtr record(int device, c10::StreamId stream);
void let_wait(int device, c10::StreamId stream, MarkPtr mark); // the stream, not the host
void host_wait(const MarkPtr& mark);
void wait_for_stream(int device, c10::StreamId stream, const std::string& why);
void wait_for_device(int device, const std::string& why);
bool is_idle(int device, c10::StreamId stream);
std::string drain(double seconds); // at exit: the name of a stream that is not done by then

// ---- waits.cpp
using Counts = std::map<std::string, long>;
void count_wait(const std::string& why); // the host waits for a stream
void count_copy(const std::string& what); // a copy that it does not wait for
Counts waits();
Counts copies();
void reset_counts();

// ---- memory.cpp
c10::DeviceAllocator* device_allocator();
void* task_address(const void* device_address); // where tasks find what the host cannot touch
int device_of(const void* device_address); // -1: no device's
bool has_memory(int device);
void record_use(const c10::DataPtr& data, int device, c10::StreamId stream);
std::pair<size_t, size_t> memory_info(int device); // free bytes, all bytes
void set_memory_share(int device, double share);

// ---- pinned.cpp
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
long pinned_bytes(); // held by tensors or copies
// Keeps the pinned block of an address until the last holder is gone; empty for other memory.
std::shared_ptr<void> hold_pinned(const void* address);

// ---- device.cpp
void register_device();

// ---- tensors.cpp
at::Tensor task_view(const at::Tensor& tensor); // the same memory as a CPU tensor, for tasks

// ---- random.cpp
const at::Generator& default_generator(int device); // -1: of the current device
at::Generator new_generator(int device);
at::Generator drawn_generator(const at::Generator* given, int device); // for one task
} // namespace simgpu
