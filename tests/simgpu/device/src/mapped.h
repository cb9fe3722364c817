// An argument of an operator with each of its tensors replaced.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace simgpu {
template <class Function>
c10::IValue mapped(const c10::IValue& value, Function function) {
  if (value.isTensor())
    return value.toTensor().defined() ? c10::IValue(function(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector())
      list.push_back(tensor.defined() ? function(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      list.push_back(tensor && tensor->defined() ? std::optional(function(*tensor)) : tensor);
    return list;
  }
  return value;
}

template <class Function>
void each_tensor(const c10::IValue& value, Function function) {
  mapped(value, [&](const at::Tensor& tensor) {
    function(tensor);
    return tensor;
  });
}
} // namespace simgpu
