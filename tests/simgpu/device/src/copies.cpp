// Copies between host and device, with CUDA's rules. Only a non_blocking copy of pinned memory is
// asynchronous on both sides. From pageable memory, what is read is read before the call returns;
// to pageable memory, the host waits even when told not to; and so it does for item().
#include "simgpu.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

namespace simgpu {
namespace {
std::function<void()> copy_task(const at::Tensor& to, const at::Tensor& from) {
  return [to, from] {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  };
}

void copy_on_devices(const at::Tensor& from, const at::Tensor& to) {
  const int source = from.device().index(), target = to.device().index();
  const auto stream = current_stream(source);
  const auto other = current_stream(target);
  if (source != target) let_wait(source, stream, record(target, other));
  enqueue(source, stream, copy_task(task_view(to), task_view(from)));
  if (source != target) let_wait(target, other, record(source, stream));
}

// CUDA copies other layouts, which its memcpy cannot, by way of pageable memory.
bool is_plain(const at::Tensor& host, const at::Tensor& device) {
  if (host.is_contiguous()) return true;
  return host.is_non_overlapping_and_dense() && host.strides() == device.strides() &&
      host.dtype() == device.dtype();
}

void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const int device = to.device().index();
  const auto stream = current_stream(device);
  const auto pinned = hold_pinned(from.const_data_ptr());
  if (non_blocking && pinned && is_plain(from, to)) {
    // It reads the memory as it is then, and holds that memory only, not the tensor.
    const auto keep = [pinned](void*) {};
    const auto raw = at::from_blob(from.data_ptr(), from.sizes(), from.strides(), keep,
                                   from.options().requires_grad(false));
    enqueue(device, stream, copy_task(task_view(to), raw));
    count_copy("async h2d");
    return;
  }
  enqueue(device, stream, copy_task(task_view(to), from.clone()));
  if (non_blocking) count_copy("pageable h2d");
  else wait_for_stream(device, stream, "copy h2d");
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const int device = from.device().index();
  const auto stream = current_stream(device);
  const auto pinned = hold_pinned(to.const_data_ptr());
  if (non_blocking && pinned && is_plain(to, from)) {
    const auto keep = [pinned](void*) {};
    const auto raw = at::from_blob(to.data_ptr(), to.sizes(), to.strides(), keep,
                                   to.options().requires_grad(false));
    enqueue(device, stream, copy_task(raw, task_view(from)));
    count_copy("async d2h");
    return;
  }
  enqueue(device, stream, copy_task(to, task_view(from)));
  wait_for_stream(device, stream,
                  non_blocking ? "copy d2h, non_blocking to pageable" : "copy d2h");
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  raise_error();
  TORCH_CHECK(at::is_expandable_to(from.sizes(), to.sizes()), "The size of tensor a ", to.sizes(),
              " must match the size of tensor b ", from.sizes());
  if (from.numel() == 0) return to;
  if (from.is_cpu()) copy_to_device(from, to, non_blocking);
  else if (to.is_cpu()) copy_to_host(from, to, non_blocking);
  else copy_on_devices(from, to);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& tensor) {
  raise_error();
  const int device = tensor.device().index();
  wait_for_stream(device, current_stream(device), "item");
  return at::_local_scalar_dense(task_view(tensor));
}
} // namespace
} // namespace simgpu

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", simgpu::copy_from);
  m.impl("_copy_from_and_resize", simgpu::copy_from_and_resize);
  m.impl("_local_scalar_dense", simgpu::item);
}
