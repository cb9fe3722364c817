// The process group simccl, over gloo, with NCCL's manners: a stream of its own a device and group,
// which waits for the current stream; wait() lets the current stream wait, not the host; it takes
// contiguous tensors of one device; and it knows AVG and reduce_scatter, which gloo does not.
#include "process_group.h"

#include "simgpu.h"
#include "work.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simgpu {
namespace {
using namespace c10d;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<Work>;
using BackendPtr = c10::intrusive_ptr<Backend>;
using Future = c10::ivalue::Future;
using std::chrono::milliseconds;

Tensors task_views(const Tensors& tensors) {
  Tensors views;
  for (auto& tensor : tensors) views.push_back(task_view(tensor));
  return views;
}

Lists task_views(const Lists& lists) {
  Lists views;
  for (auto& tensors : lists) views.push_back(task_views(tensors));
  return views;
}

Tensors joined(Tensors tensors, const Lists& lists) {
  for (auto& more : lists) tensors.insert(tensors.end(), more.begin(), more.end());
  return tensors;
}

ReduceOp without_mean(const ReduceOp& op) {
  return op == ReduceOp::AVG ? ReduceOp(ReduceOp::SUM) : op;
}

void divide_mean(at::Tensor sum, const ReduceOp& op, int size) {
  if (op != ReduceOp::AVG) return;
  if (at::isIntegralType(sum.scalar_type(), true)) sum.div_(size, "trunc");
  else sum.div_(size);
}

void reduce_all(const BackendPtr& gloo, const at::Tensor& tensor, const ReduceOp& op, int size) {
  AllreduceOptions options;
  options.reduceOp = without_mean(op);
  Tensors one{tensor};
  gloo->allreduce(one, options)->wait();
  divide_mean(tensor, op, size);
}

class SimCCL final : public Backend {
 public:
  explicit SimCCL(BackendPtr gloo)
      : Backend(gloo->getRank(), gloo->getSize()),
        gloo_(gloo),
        options_(c10::make_intrusive<Options>("simccl")) {}
  const std::string getBackendName() const override {
    return "simccl";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options_;
  }
  uint64_t getSequenceNumberForGroup() override {
    return calls_;
  }
  void setSequenceNumberForGroup() override {}
  void setTimeout(milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }
  void shutdown() override { // as NCCL's: waits for all collectives
    std::unique_lock lock(mutex_);
    const auto streams = streams_;
    lock.unlock();
    for (auto [key, stream] : streams) wait_for_stream(key.first, stream, "shutdown");
  }

  WorkPtr broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    return run(OpType::BROADCAST, tensors, tensors,
               [=, gloo = gloo_, views = task_views(tensors)]() mutable {
                 gloo->broadcast(views, options)->wait();
               });
  }
  WorkPtr allreduce(Tensors& tensors, const AllreduceOptions& options) override {
    return run(OpType::ALLREDUCE, tensors, tensors,
               [op = options.reduceOp, gloo = gloo_, views = task_views(tensors), n = getSize()] {
                 for (auto& view : views) reduce_all(gloo, view, op, n);
               });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const ReduceOptions& options) override {
    return run(OpType::REDUCE, tensors, tensors,
               [=, gloo = gloo_, views = task_views(tensors), rank = getRank(),
                n = getSize()]() mutable {
                 auto of_gloo = options;
                 of_gloo.reduceOp = without_mean(options.reduceOp);
                 gloo->reduce(views, of_gloo)->wait();
                 if (rank == options.rootRank) divide_mean(views[0], options.reduceOp, n);
               });
  }
  WorkPtr allgather(Lists& to, Tensors& from, const AllgatherOptions& options) override {
    return run(OpType::ALLGATHER, joined(from, to), to.at(0),
               [=, gloo = gloo_, to = task_views(to), from = task_views(from)]() mutable {
                 gloo->allgather(to, from, options)->wait();
               });
  }
  WorkPtr _allgather_base(at::Tensor& to, at::Tensor& from,
                          const AllgatherOptions& options) override {
    Tensors tos{to}, froms{from};
    return allgather_into_tensor_coalesced(tos, froms, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& to, Tensors& from,
                                          const AllgatherOptions& options) override {
    return run(OpType::_ALLGATHER_BASE, joined(to, {from}), to,
               [=, gloo = gloo_, to = task_views(to), from = task_views(from)]() mutable {
                 for (size_t i = 0; i < to.size(); ++i) {
                   auto part = from[i].clone(); // it may be a part of the output
                   gloo->_allgather_base(to[i], part, options)->wait();
                 }
               });
  }
  WorkPtr gather(Lists& to, Tensors& from, const GatherOptions& options) override {
    return run(OpType::GATHER, joined(from, to), to.empty() ? Tensors{} : to[0],
               [=, gloo = gloo_, to = task_views(to), from = task_views(from)]() mutable {
                 gloo->gather(to, from, options)->wait();
               });
  }
  WorkPtr scatter(Tensors& to, Lists& from, const ScatterOptions& options) override {
    return run(OpType::SCATTER, joined(to, from), to,
               [=, gloo = gloo_, to = task_views(to), from = task_views(from)]() mutable {
                 gloo->scatter(to, from, options)->wait();
               });
  }
  WorkPtr reduce_scatter(Tensors& to, Lists& from, const ReduceScatterOptions& options) override {
    return run(OpType::REDUCE_SCATTER, joined(to, from), to,
               [op = options.reduceOp, gloo = gloo_, to = task_view(to.at(0)),
                from = task_views(from.at(0)), n = getSize(), rank = getRank()] {
                 for (int other = 0; other < n; ++other) {
                   const auto part = from[other].clone();
                   reduce_all(gloo, part, op, n);
                   if (other == rank) to.copy_(part);
                 }
               });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& to, at::Tensor& from,
                               const ReduceScatterOptions& options) override {
    return run(OpType::_REDUCE_SCATTER_BASE, {to, from}, {to},
               [op = options.reduceOp, gloo = gloo_, to = task_view(to), from = task_view(from),
                n = getSize(), rank = getRank()] {
                 const auto all = from.clone();
                 reduce_all(gloo, all, op, n);
                 to.copy_(all.reshape({n, -1}).select(0, rank).reshape(to.sizes()));
               });
  }
  WorkPtr alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<int64_t>& to_sizes,
                        std::vector<int64_t>& from_sizes,
                        const AllToAllOptions& options) override {
    return run(OpType::ALLTOALL_BASE, {to, from}, {to},
               [=, gloo = gloo_, to = task_view(to), from = task_view(from)]() mutable {
                 gloo->alltoall_base(to, from, to_sizes, from_sizes, options)->wait();
               });
  }
  WorkPtr send(Tensors& tensors, int other, int tag) override {
    return run(OpType::SEND, tensors, tensors,
               [=, gloo = gloo_, views = task_views(tensors)]() mutable {
                 gloo->send(views, other, tag)->wait();
               });
  }
  WorkPtr recv(Tensors& tensors, int other, int tag) override {
    return run(OpType::RECV, tensors, tensors,
               [=, gloo = gloo_, views = task_views(tensors)]() mutable {
                 gloo->recv(views, other, tag)->wait();
               });
  }
  WorkPtr barrier(const BarrierOptions& options) override {
    const int bound = bound_ < 0 ? current_device() : bound_.load();
    const int device = options.device_ids.empty() ? bound : options.device_ids[0];
    const auto token = at::zeros({1}, at::TensorOptions().device(c10::Device(kType, device)));
    auto work = run(OpType::BARRIER, {token}, {token}, [gloo = gloo_] { gloo->barrier()->wait(); });
    static_cast<SimWork*>(work.get())->host_waits = true;
    return work;
  }

 private:
  WorkPtr run(OpType kind, const Tensors& used, const Tensors& outputs,
              std::function<void()> task) {
    raise_error();
    TORCH_CHECK(!used.empty(), "simccl: a collective without tensors");
    const int device = used[0].device().index();
    for (auto& tensor : used) {
      TORCH_CHECK(tensor.device().type() == kType, "simccl moves only simgpu tensors, got ",
                  tensor.device());
      TORCH_CHECK(tensor.device().index() == device, "simccl: tensors of two devices");
      const bool is_sent = kind == OpType::SEND || kind == OpType::RECV; // NCCL only warns
      TORCH_CHECK_VALUE(is_sent || tensor.is_contiguous(tensor.suggest_memory_format()),
                        "Tensors must be contiguous");
    }
    std::lock_guard lock(mutex_);
    if (bound_ < 0) bound_ = device;
    ++calls_;
    // A send has a stream of its own: gloo knows no groups of calls.
    const bool sends = kind == OpType::SEND;
    const std::pair key{device, sends};
    if (!streams_.count(key)) streams_[key] = new_stream(device);
    const auto stream = streams_[key];
    // NCCL's communicator of another device is another one; here gloo's calls keep their order.
    if (last_[sends]) let_wait(device, stream, last_[sends]);
    let_wait(device, stream, record(device, current_stream(device)));
    for (auto& tensor : used) record_use(tensor.storage().data_ptr(), device, stream);
    enqueue(device, stream, std::move(task));
    last_[sends] = record(device, stream);
    auto work = c10::make_intrusive<SimWork>(device, last_[sends], outputs, kind);
    const c10::Device on(kType, device);
    const auto type = c10::ListType::create(c10::TensorType::get());
    work->future = c10::make_intrusive<Future>(type, std::vector<c10::Device>{on});
    const c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, on, stream));
    work->future->markCompleted(c10::IValue(outputs));
    return work;
  }
  BackendPtr gloo_;
  c10::intrusive_ptr<Options> options_;
  std::mutex mutex_; // of what follows
  std::atomic<int> bound_{-1}; // the device of the first collective
  std::map<std::pair<int, bool>, c10::StreamId> streams_; // by device, and whether it sends
  std::map<bool, MarkPtr> last_; // the end of the last call, by whether it sends
  std::atomic<uint64_t> calls_{0};
};
} // namespace

BackendPtr make_simccl(BackendPtr gloo) {
  return c10::make_intrusive<SimCCL>(gloo);
}
} // namespace simgpu
