// Operators: each call becomes a task of its stream, which runs torch's CPU kernel on the memory
// that the host cannot touch. The result's shape comes from the meta kernel, at once. Where there
// is none, since the shape or a value depends on the data, the host waits, as with CUDA.
#include "simgpu.h"

#include "call.h"
#include "mapped.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace simgpu {
namespace {
using torch::jit::Stack;

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// Return the results' shapes as meta tensors; nothing where they depend on the data.
std::optional<Stack> shapes(const Call& call) {
  Stack stack;
  for (auto& argument : call.arguments) {
    auto meta = mapped(argument, [](const at::Tensor& tensor) {
      if (tensor.is_cpu() && tensor.dim() == 0) return tensor;
      const auto options = tensor.options().device(at::kMeta);
      return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    });
    if (meta.isDevice()) meta = c10::Device(at::kMeta);
    if (meta.isGenerator()) meta = IValue();
    stack.push_back(meta);
  }
  try {
    call.op.callBoxed(&stack);
    return stack;
  } catch (const c10::NotImplementedError&) { // no meta kernel: the caller waits for the values
  } catch (const std::exception& e) { // a meta kernel of Python's raises errors of its own
    const auto* own = dynamic_cast<const c10::Error*>(&e);
    const std::string what = own ? own->what_without_backtrace() : e.what();
    for (auto* part : {"meta", "Meta", "DynamicOutputShape", "NotImplemented"})
      if (contains(what, part)) return std::nullopt;
    throw;
  }
  return std::nullopt;
}

// Return the arguments as a task of the stream takes them: CPU tensors of the device's memory.
Stack task_arguments(const Call& call) {
  const auto& schema = call.op.schema();
  const bool random = call.op.hasTag(at::Tag::nondeterministic_seeded);
  const bool indexes = call.name.starts_with("aten::index") ||
      call.name.starts_with("aten::_index_put");
  Stack stack;
  for (size_t a = 0; a < call.arguments.size(); ++a) {
    const auto& given = call.arguments[a];
    auto value = mapped(given, [&](const at::Tensor& tensor) {
      if (tensor.device().type() == kType) return task_view(tensor);
      const bool index = indexes && tensor.dim() > 0;
      if (!tensor.is_cpu() || (tensor.dim() > 0 && !index)) call.refuse(tensor.device());
      if (index) wait_for_stream(call.device(), call.stream, "copy h2d of an index");
      return tensor.clone();
    });
    if (value.isDevice()) value = c10::Device(at::kCPU);
    if (random && contains(schema.arguments()[a].type()->str(), "Generator")) {
      const auto own = given.isGenerator() ? std::optional(given.toGenerator()) : std::nullopt;
      value = drawn_generator(own ? &*own : nullptr, call.device());
    }
    stack.push_back(value);
  }
  return stack;
}

at::Tensor device_like(const at::Tensor& tensor, c10::Device device) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
}

void run_now(const Call& call, Stack* stack) {
  auto values = task_arguments(call);
  const std::string why = call.has_new_values ? "value of " : "shape of ";
  wait_for_stream(call.device(), call.stream, why + call.name);
  call.op.callBoxed(&values);
  for (size_t r = 0; r < call.written.size(); ++r) {
    const int written = call.written[r];
    stack->push_back(written >= 0 ? call.arguments[written] : mapped(values[r], [&](auto& tensor) {
      auto result = device_like(tensor, call.target);
      host_wait(record(call.device(), call.stream)); // its memory is free of what was there
      task_view(result).copy_(tensor);
      return result;
    }));
  }
}

void write(const IValue& to, const IValue& from) {
  if (to.isTensor() && to.toTensor().defined()) {
    const auto found = from.toTensor();
    // A kernel may leave out what its shape promised: the statistics of batch_norm's evaluation.
    if (found.defined() && (found.numel() || !to.toTensor().numel())) to.toTensor().copy_(found);
  }
  if (to.isTensorList())
    for (size_t i = 0; i < to.toTensorVector().size(); ++i)
      to.toTensorVector()[i].copy_(from.toTensorVector()[i]);
}

void run_later(const Call& call, const Stack& metas, Stack* stack) {
  for (size_t r = 0; r < metas.size(); ++r)
    if (call.written[r] >= 0 && call.arguments[call.written[r]].isTensor()) {
      const auto out = call.arguments[call.written[r]].toTensor();
      const auto sizes = metas[r].toTensor().sizes();
      if (out.sizes() != sizes) out.resize_(sizes);
    }
  auto values = task_arguments(call);
  std::vector<std::pair<size_t, IValue>> outputs;
  for (size_t r = 0; r < call.written.size(); ++r) {
    if (const int written = call.written[r]; written >= 0) {
      stack->push_back(call.arguments[written]);
      // Some losses resize out= on their way to a sum. Memory of the device cannot be.
      if (contains(call.name, "_loss.out")) {
        outputs.emplace_back(r, values[written]);
        values[written] = at::empty({0}, values[written].toTensor().options());
      }
      continue;
    }
    stack->push_back(mapped(metas[r], [&](const at::Tensor& tensor) {
      return device_like(tensor, call.target);
    }));
    outputs.emplace_back(r, mapped(stack->back(), task_view));
  }
  enqueue(call.device(), call.stream, [op = call.op, values, outputs]() mutable {
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::NoGradGuard no_grad;
    try {
      op.callBoxed(&values);
    } catch (const c10::Error& e) {
      const auto name = toString(op.schema().operator_name());
      TORCH_CHECK(false, name, ": ", e.what_without_backtrace());
    }
    for (auto& [r, output] : outputs) write(output, values[r]);
  });
}

void launch(const c10::OperatorHandle& op, Stack* stack) {
  raise_error();
  const auto call = make_call(op, stack);
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
                              "simgpu has no ", call.name, ", since the CPU has none");
  const c10::DeviceGuard guard(call.target);
  const at::AutoDispatchBelowADInplaceOrView below;
  std::optional<Stack> metas;
  if (!call.has_new_values) metas = call.has_new_tensors ? shapes(call) : Stack();
  if (metas) run_later(call, *metas, stack);
  else run_now(call, stack);
}

void any_operator(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  launch(op, stack);
}

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  launch(find("aten::convolution"), stack);
}

// The CPU's operator takes one more argument, the bias' sizes, after the weight.
void convolution_backward(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  const auto weight = (*stack)[stack->size() - 8].toTensor();
  const bool transposed = (*stack)[stack->size() - 4].toBool();
  const int64_t groups = (*stack)[stack->size() - 2].toInt();
  const std::vector<int64_t> sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  stack->insert(stack->end() - 7, IValue(sizes));
  launch(find("aten::convolution_backward"), stack);
}
} // namespace
} // namespace simgpu

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&simgpu::any_operator>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using torch::CppFunction;
  // Else torch would look for a mask's shape, and then find no room for it in the result.
  m.impl("index.Tensor", CppFunction::makeFromBoxedFunction<&simgpu::any_operator>());
  m.impl("convolution_overrideable", CppFunction::makeFromBoxedFunction<&simgpu::convolution>());
  m.impl("convolution_backward_overrideable",
         CppFunction::makeFromBoxedFunction<&simgpu::convolution_backward>());
}
