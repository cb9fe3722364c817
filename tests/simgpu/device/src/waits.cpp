// Counts the calls that make the host wait for a stream, by their cause, also where the stream is
// done already; not who asks again and again (query, is_completed), and one for a call that waits
// twice. Beside it, the copies that the host does not wait for. A function of Python's may watch
// both, to tell the lines that cause them.
#include <Python.h>

#include "simgpu.h"
#include "watch.h"

namespace simgpu {
namespace {
PyObject* watcher = nullptr;
struct State {
  std::mutex mutex;
  Counts waits, copies;
};
State& state() {
  static auto* only = new State;
  return *only;
}

void count(Counts& counts, const std::string& what) {
  {
    std::lock_guard lock(state().mutex);
    ++counts[what];
  }
  if (watcher == nullptr || !Py_IsInitialized()) return;
  const auto gil = PyGILState_Ensure();
  PyObject* result = PyObject_CallFunction(watcher, "s", what.c_str());
  if (result == nullptr) PyErr_Print();
  Py_XDECREF(result);
  PyGILState_Release(gil);
}
} // namespace

void count_wait(const std::string& why) {
  count(state().waits, why);
}

void count_copy(const std::string& what) {
  count(state().copies, what);
}

Counts waits() {
  std::lock_guard lock(state().mutex);
  return state().waits;
}

Counts copies() {
  std::lock_guard lock(state().mutex);
  return state().copies;
}

void reset_counts() {
  std::lock_guard lock(state().mutex);
  state().waits.clear();
  state().copies.clear();
}

void watch(PyObject* function) {
  Py_XINCREF(function);
  Py_XDECREF(watcher);
  watcher = function;
}
} // namespace simgpu
