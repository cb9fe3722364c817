// Making tensors and views of them, which needs no task, and two operators for which CUDA has
// kernels of its own.
#include "simgpu.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace simgpu {
using at::Tensor;
template <class T>
using Optional = std::optional<T>;

Tensor task_view(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  void* address = task_address(tensor.unsafeGetTensorImpl()->mutable_data());
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (!address || tensor.numel() == 0)
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(address, tensor.sizes(), tensor.strides(), options);
}

namespace {
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(at::IntArrayRef size, Optional<at::ScalarType> dtype, Optional<at::Layout>,
             Optional<at::Device> device, Optional<bool>, Optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  const auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_generic(size, device_allocator(), kKeys, type, format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, Optional<at::ScalarType> dtype,
                     Optional<at::Layout>, Optional<at::Device> device, Optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  const auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, type);
}

Tensor as_strided(const Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride,
                  Optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

Tensor view(const Tensor& tensor, at::IntArrayRef size) {
  return at::native::view(tensor, size);
}

Tensor unfold(const Tensor& tensor, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(tensor, dim, size, step);
}

Tensor reshape_alias(const Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(tensor, size, stride);
}

const Tensor& resize_(const Tensor& tensor, at::IntArrayRef size,
                      Optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(tensor.device());
  const auto bytes = at::detail::computeStorageNbytesContiguous(
      size, tensor.itemsize(), tensor.storage_offset());
  // torch's own would copy the old memory by the host.
  if (bytes > tensor.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
  return at::native::resize_(tensor, size, format);
}

Tensor& set_strided(Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef size,
                    at::IntArrayRef stride) {
  return at::cpu::set_(tensor, storage, offset, size, stride);
}

Tensor& set_storage(Tensor& tensor, at::Storage storage) {
  return at::native::set_(tensor, storage);
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return at::native::set_tensor_(tensor, source);
}

void record_stream(Tensor& tensor, at::Stream stream) {
  record_use(tensor.storage().data_ptr(), stream.device_index(), stream.id());
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, Optional<bool> train) {
  const auto bools = input.options().dtype(at::kBool);
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, bools)};
  auto mask = at::empty_like(input, bools).bernoulli_(1 - p);
  return {input.mul(mask).mul(1 / (1 - p)), mask};
}

int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const Optional<Tensor>&, double,
                   bool, Optional<double>, bool) {
  return 0; // attention in plain operators
}
} // namespace
} // namespace simgpu

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", simgpu::empty);
  m.impl("empty_strided", simgpu::empty_strided);
  m.impl("as_strided", simgpu::as_strided);
  m.impl("view", simgpu::view);
  m.impl("unfold", simgpu::unfold);
  m.impl("_reshape_alias", simgpu::reshape_alias);
  m.impl("resize_", simgpu::resize_);
  m.impl("set_.source_Storage_storage_offset", simgpu::set_strided);
  m.impl("set_.source_Storage", simgpu::set_storage);
  m.impl("set_.source_Tensor", simgpu::set_tensor);
  m.impl("record_stream", simgpu::record_stream);
  m.impl("native_dropout", simgpu::native_dropout);
  m.impl("_fused_sdp_choice", simgpu::sdp_choice);
}
