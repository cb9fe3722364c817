// Streams: each is a thread that runs its tasks in their order, SIMGPU_DELAY_US late each.
// Nothing else orders two streams, or a stream and the host, so that a missing wait shows. But a
// stream that has little to do is always done before the default one asks for it. So the others
// may be later still, SIMGPU_SIDE_DELAY_US, with each task for which nothing waits yet.
#include "simgpu.h"

#include <Python.h>

#include <array>
#include <deque>
#include <thread>

namespace simgpu {
namespace {
constexpr size_t kPool = 32;
using std::chrono::microseconds;

class Stream {
 public:
  // The thread never ends: the process ends without it.
  explicit Stream(bool is_default)
      : side_delay_(is_default ? 0 : settings().side_delay_us) {
    std::thread([this] { run(); }).detach();
  }
  void add(std::function<void()> task, Delay delay, MarkPtr mark = nullptr) {
    std::lock_guard lock(mutex_);
    ++added_;
    if (mark) mark->hurry = [this, number = added_] { hurry(number); };
    tasks_.push_back({std::move(task), delay, std::move(mark)});
    unfinished_ += delay == Delay::yes;
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
    MarkPtr mark; // of its end
  };
  void hurry(size_t number) { // something waits for the tasks up to this one
    std::lock_guard lock(mutex_);
    wanted_ = std::max(wanted_, number);
    changed_.notify_one();
  }
  [[noreturn]] void run() {
    for (;;) {
      Task task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
        ++begun_;
        if (task.delay == Delay::yes)
          changed_.wait_for(lock, side_delay_, [&] { return wanted_ >= begun_; });
      }
      if (task.delay == Delay::yes) std::this_thread::sleep_for(delay_);
      try {
        if (task.run) task.run();
      } catch (...) {
        set_error(std::current_exception());
      }
      task.run = nullptr; // frees what it holds before the stream counts as idle
      {
        std::lock_guard lock(mutex_);
        unfinished_ -= task.delay == Delay::yes;
      }
      if (task.mark) task.mark->finish(); // who waits for it finds the stream idle
    }
  }
  const microseconds delay_{settings().delay_us}, side_delay_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  size_t added_ = 0, begun_ = 0, wanted_ = 0, unfinished_ = 0;
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
  if (streams.all.empty()) streams.all.push_back(new Stream(true));
  streams.all.push_back(new Stream(false));
  return streams.all.size() - 1;
}

Stream* stream_of(int device, c10::StreamId id) {
  own_process();
  auto& streams = streams_of(device);
  std::lock_guard lock(streams.mutex);
  if (streams.all.empty()) streams.all.push_back(new Stream(true));
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
  if (hurry) hurry();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_; });
}

bool Mark::wait_until(std::chrono::steady_clock::time_point deadline) {
  if (hurry) hurry();
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [&] { return done_; });
}

bool Mark::is_done() {
  std::lock_guard lock(mutex_);
  return done_;
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
  stream_of(device, stream)->add(nullptr, Delay::yes, mark);
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

std::string drain(double seconds) {
  if (!is_owner()) return "";
  const std::chrono::milliseconds limit(long(seconds * 1e3));
  const auto deadline = std::chrono::steady_clock::now() + limit;
  std::map<std::pair<int, size_t>, MarkPtr> marks;
  for (int device = 0; device < kMostDevices; ++device)
    for (size_t id = 0; id < number_of_streams(device); ++id)
      marks[{device, id}] = record(device, id);
  for (auto& [stream, mark] : marks)
    if (!mark->wait_until(deadline))
      return c10::str("stream ", stream.second, " of simgpu:", stream.first);
  return "";
}
} // namespace simgpu
