// The process group simccl, for Python.
#pragma once
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simgpu {
// Return a process group that sends the tensors of devices by another one.
c10::intrusive_ptr<c10d::Backend> make_simccl(c10::intrusive_ptr<c10d::Backend> gloo);
} // namespace simgpu
