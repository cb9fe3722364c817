// One collective of simccl: its end is a mark in the stream of its group.
#pragma once
#include "simgpu.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace simgpu {
class SimWork final : public c10d::Work {
 public:
  SimWork(int device, MarkPtr mark, const std::vector<at::Tensor>& outputs, c10d::OpType kind)
      : Work(-1, kind), device_(device), mark_(mark), outputs_(outputs) {}
  bool isCompleted() override {
    return mark_->is_done();
  }
  bool isSuccess() const override {
    return true;
  }
  void synchronize() override {
    let_wait(device_, current_stream(device_), mark_);
  }
  bool wait(std::chrono::milliseconds) override {
    raise_error();
    synchronize();
    if (host_waits) {
      count_wait("barrier");
      host_wait(mark_);
    }
    return true;
  }
  std::vector<at::Tensor> result() override {
    return outputs_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future;
  }
  bool host_waits = false;
  c10::intrusive_ptr<c10::ivalue::Future> future;

 private:
  int device_;
  MarkPtr mark_;
  std::vector<at::Tensor> outputs_;
};
} // namespace simgpu
