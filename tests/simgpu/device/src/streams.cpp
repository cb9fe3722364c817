// Streams: each is a thread that runs its tasks in their order, SIMGPU_DELAY_US late each.
// Nothing else orders two streams, or a stream and the host, so that a missing wait shows.
#include "simgpu.h"

#include <Python.h>

#include <array>
#include <atomic>
#include <deque>
#include <thread>

namespace simgpu {
namespace {
constexpr size_t kPool = 32;
std::atomic<long> delay_before_task_us{0};

class Stream {
 public:
  // The thread never ends: the process ends without it.
  Stream() {
    std::thread([this] { run(); }).detach();
  }
  void add(std::function<void()> task, Delay delay) {
    std::lock_guard lock(mutex_);
    tasks_.push_back({std::move(task), delay});
    ++unfinished_;
    changed_.notify_one();
  }
  bool is_idle() {
    std::lock_guard lock(mutex_);
    return unfinished_ == 0;
  }

 private:
  struct Task {
    std::function<void()> run;
    Delay delay;
  };
  [[noreturn]] void run() {
    for (;;) {
      Task task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      if (long us = delay_before_task_us; us && task.delay == Delay::yes)
        std::this_thread::sleep_for(std::chrono::microseconds(us));
      try {
        task.run();
      } catch (...) {
        set_error(std::current_exception());
      }
      task.run = nullptr; // frees what it holds before the stream counts as idle
      std::lock_guard lock(mutex_);
      --unfinished_;
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  size_t unfinished_ = 0;
};

struct Streams { // of a device; the first is its default stream
  std::mutex mutex;
  std::deque<Stream*> all;
  std::deque<c10::StreamId> pool; // the next one is the first
};

Streams& streams_of(int device) {
  static auto* all = new std::array<Streams, kMostDevices>;
  return all->at(device);
}

c10::StreamId add_stream(Streams& streams) {
  if (streams.all.empty()) streams.all.push_back(new Stream);
  streams.all.push_back(new Stream);
  return streams.all.size() - 1;
}

Stream* stream_of(int device, c10::StreamId id) {
  own_process();
  auto& streams = streams_of(device);
  std::lock_guard lock(streams.mutex);
  if (streams.all.empty()) streams.all.push_back(new Stream);
  return streams.all.at(id);
}

size_t number_of_streams(int device) {
  auto& streams = streams_of(device);
  std::lock_guard lock(streams.mutex);
  return streams.all.size();
}

thread_local std::array<c10::StreamId, kMostDevices> streams_of_thread{};
} // namespace

void Mark::finish() {
  std::lock_guard lock(mutex_);
  time = std::chrono::steady_clock::now();
  done_ = true;
  changed_.notify_all();
}

void Mark::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_; });
}

bool Mark::wait_until(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [&] { return done_; });
}

bool Mark::is_done() {
  std::lock_guard lock(mutex_);
  return done_;
}

void set_delay_us(long delay_us) {
  delay_before_task_us = delay_us;
}

c10::StreamId current_stream(int device) {
  return streams_of_thread.at(device);
}

c10::StreamId exchange_stream(int device, c10::StreamId stream) {
  return std::exchange(streams_of_thread.at(device), stream);
}

c10::StreamId new_stream(int device) {
  own_process();
  auto& streams = streams_of(device);
  std::lock_guard lock(streams.mutex);
  return add_stream(streams);
}

c10::StreamId pool_stream(int device) {
  own_process();
  auto& streams = streams_of(device);
  std::lock_guard lock(streams.mutex);
  if (streams.pool.size() < kPool) {
    streams.pool.push_back(add_stream(streams));
    return streams.pool.back();
  }
  auto next = streams.pool.front();
  streams.pool.pop_front();
  streams.pool.push_back(next);
  return next;
}

void enqueue(int device, c10::StreamId stream, std::function<void()> task, Delay delay) {
  stream_of(device, stream)->add(std::move(task), delay);
}

MarkPtr record(int device, c10::StreamId stream) {
  auto mark = std::make_shared<Mark>();
  enqueue(device, stream, [mark] { mark->finish(); });
  return mark;
}

void let_wait(int device, c10::StreamId stream, MarkPtr mark) {
  if (mark) enqueue(device, stream, [mark] { mark->wait(); });
}

void host_wait(const MarkPtr& mark) {
  if (!mark) return;
  if (Py_IsInitialized() && PyGILState_Check()) {
    Py_BEGIN_ALLOW_THREADS
    mark->wait();
    Py_END_ALLOW_THREADS
  } else {
    mark->wait();
  }
  raise_error();
}

void wait_for_stream(int device, c10::StreamId stream, const std::string& why) {
  count_wait(why);
  host_wait(record(device, stream));
}

void wait_for_device(int device, const std::string& why) {
  own_process();
  count_wait(why);
  const size_t number = number_of_streams(device);
  std::deque<MarkPtr> marks;
  for (size_t id = 0; id < number; ++id) marks.push_back(record(device, id));
  for (auto& mark : marks) host_wait(mark);
}

bool is_idle(int device, c10::StreamId stream) {
  return stream_of(device, stream)->is_idle();
}

bool drain(double seconds) {
  if (!is_owner()) return true;
  const std::chrono::milliseconds limit(long(seconds * 1e3));
  const auto deadline = std::chrono::steady_clock::now() + limit;
  std::deque<MarkPtr> marks;
  for (int device = 0; device < kMostDevices; ++device)
    for (size_t id = 0; id < number_of_streams(device); ++id) marks.push_back(record(device, id));
  for (auto& mark : marks)
    if (!mark->wait_until(deadline)) return false;
  return true;
}
} // namespace simgpu
