// One call of an operator: its device and stream, and what becomes of its results.
#pragma once
#include "simgpu.h"

#include "mapped.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace simgpu {
using c10::IValue;

struct Call {
  c10::OperatorHandle op;
  std::string name;
  std::vector<IValue> arguments;
  c10::Device target;
  c10::StreamId stream;
  // For each result, the argument that is written and returned, or -1 for a new value.
  std::vector<int> written;
  bool has_new_tensors; // or out= arguments, perhaps to be resized
  bool has_new_values;  // numbers, which no stream can hold

  int device() const {
    return target.index();
  }
  [[noreturn]] void refuse(c10::Device other) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two "
                "devices, ", target, " and ", other, "! (", name, ")");
  }
};

inline void find_device(Call& call) {
  bool found = false;
  for (auto& argument : call.arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      if (tensor.device().type() != kType) return;
      if (!found) call.target = tensor.device();
      found = true;
      if (call.target != tensor.device()) call.refuse(tensor.device());
    });
    if (!found && argument.isDevice() && argument.toDevice().type() == kType) {
      call.target = argument.toDevice();
      found = true;
    }
  }
  if (call.target.index() < 0) call.target = c10::Device(kType, current_device());
  // Also a scalar of the CPU, which may only be read.
  for (size_t a = 0; a < call.arguments.size(); ++a)
    if (auto* alias = call.op.schema().arguments()[a].alias_info(); alias && alias->isWrite())
      each_tensor(call.arguments[a], [&](const at::Tensor& tensor) {
        if (tensor.device() != call.target) call.refuse(tensor.device());
      });
}

inline void find_results(Call& call) {
  const auto& schema = call.op.schema();
  for (const auto& result : schema.returns()) {
    int written = -1;
    const auto* alias = result.alias_info();
    if (alias && alias->isWrite()) {
      for (size_t a = 0; a < schema.arguments().size(); ++a)
        if (auto* own = schema.arguments()[a].alias_info(); own && *own == *alias) written = a;
      TORCH_INTERNAL_ASSERT(written >= 0, call.name);
      call.has_new_tensors |= schema.arguments()[written].kwarg_only();
    } else {
      TORCH_CHECK(!alias, "simgpu has no view ", call.name);
      const auto kind = result.type()->kind();
      const bool tensor = kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
      (tensor ? call.has_new_tensors : call.has_new_values) = true;
    }
    call.written.push_back(written);
  }
}

inline Call make_call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t number = op.schema().arguments().size();
  Call call{op, toString(op.schema().operator_name()), {stack->end() - number, stack->end()},
            c10::Device(kType, -1), 0, {}, false, false};
  torch::jit::drop(*stack, number);
  find_device(call);
  call.stream = current_stream(call.device());
  find_results(call);
  return call;
}
} // namespace simgpu
