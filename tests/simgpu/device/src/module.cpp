// What Python sees of the simulated GPU.
#include "process_group.h"
#include "simgpu.h"
#include "watch.h"

#include <ATen/core/Generator.h>
#include <torch/csrc/utils/pybind.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  simgpu::register_device();
  m.def("device_count", [] { return simgpu::settings().devices; });
  m.def("is_initialized", simgpu::is_owner);
  m.def("is_forked", simgpu::is_forked);
  m.def("set_memory_share", simgpu::set_memory_share);
  m.def("memory_info", simgpu::memory_info);
  m.def("waits", simgpu::waits);
  m.def("copies", simgpu::copies);
  m.def("reset_counts", simgpu::reset_counts);
  m.def("watch", [](pybind11::object function) {
    simgpu::watch(function.is_none() ? nullptr : function.ptr());
  });
  m.def("pinned_bytes", simgpu::pinned_bytes);
  pybind11::class_<simgpu::Mark, simgpu::MarkPtr>(m, "Hold")
      .def("release", &simgpu::Mark::finish);
  m.def("hold", [](int device, c10::StreamId stream) {
    auto mark = std::make_shared<simgpu::Mark>();
    simgpu::let_wait(device, stream, mark);
    return mark;
  });
  m.def("default_generator", [](int device) { return simgpu::default_generator(device); });
  m.def("drain", simgpu::drain, Unlocked());
  m.def("make_simccl", simgpu::make_simccl, Unlocked());
}
